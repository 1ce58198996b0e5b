#pragma once
#include <map>
#include <string>

#include "caffe/layer.hpp"

namespace caffe {

template <typename Dtype>
class LayerRegistry {
 public:
  typedef shared_ptr<Layer<Dtype> > (*Creator)(const LayerParameter&);
  static std::map<string, Creator>& Registry() {
    static std::map<string, Creator> known;
    return known;
  }
  static void AddCreator(const string& type, Creator creator) {
    CHECK_EQ(Registry().count(type), 0) << type << " is registered";
    Registry()[type] = creator;
  }
  static shared_ptr<Layer<Dtype> > CreateLayer(const LayerParameter& param) {
    CHECK_EQ(Registry().count(param.type()), 1) << "Unknown layer type: " << param.type();
    return Registry()[param.type()](param);
  }
};

template <typename Dtype, template <typename> class Kind>
shared_ptr<Layer<Dtype> > Created(const LayerParameter& param) {
  return shared_ptr<Layer<Dtype> >(new Kind<Dtype>(param));
}

template <template <typename> class Kind>
struct Registered {
  explicit Registered(const string& type) {
    LayerRegistry<float>::AddCreator(type, &Created<float, Kind>);
    LayerRegistry<double>::AddCreator(type, &Created<double, Kind>);
  }
};

#define REGISTER_LAYER_CLASS(type) static const Registered<type##Layer> registered_##type(#type)

}  // namespace caffe
