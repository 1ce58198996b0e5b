#ifndef CAFFE_LAYERS_INTEGER_LAYER_HPP_
#define CAFFE_LAYERS_INTEGER_LAYER_HPP_

#include <cmath>
#include <vector>

#include "caffe/blob.hpp"
#include "caffe/layer.hpp"
#include "caffe/proto/caffe.pb.h"

namespace caffe {

// A layer with weights of a deploy model: its bottoms hold integers, its tops exact sums.
//
// It is the net's own layer of the plain type, one for each bottom, in double precision, which adds integers exactly
// whatever the order: no sum of products of 16 and 8 bits leaves 53 bits. What a float blob cannot hold of a sum is in
// the diff of the blob.
template <typename Dtype>
class IntegerLayer : public Layer<Dtype> {
 public:
  explicit IntegerLayer(const LayerParameter& param) : Layer<Dtype>(param), has_bias_(false), is_loaded_(false) {}
  virtual void LayerSetUp(const vector<Blob<Dtype>*>& bottom, const vector<Blob<Dtype>*>& top);
  virtual void Reshape(const vector<Blob<Dtype>*>& bottom, const vector<Blob<Dtype>*>& top);
  virtual inline const char* type() const { return type_.c_str(); }
  // The plain type and the integers, as they were loaded.
  virtual void ToProto(LayerParameter* param, bool write_diff = false);
  // The integers of a caffemodel: int8 weights or 4-bit indices and the table of their values, int32 biases.
  void Load(const LayerParameter& source);

 protected:
  virtual void Forward_cpu(const vector<Blob<Dtype>*>& bottom, const vector<Blob<Dtype>*>& top);
  virtual void Backward_cpu(const vector<Blob<Dtype>*>& top, const vector<bool>& propagate_down,
                            const vector<Blob<Dtype>*>& bottom);

 private:
  typedef vector<Blob<double>*> Blobs;
  void LoadWeight(const BlobProto& stored, const BlobProto* table);

  string type_;
  LayerParameter loaded_;
  vector<shared_ptr<Layer<double> > > inner_;
  vector<shared_ptr<Blob<double> > > in_, out_;
  bool has_bias_, is_loaded_;
};

// Whether a blob of sums has values that float32 may not hold, so that the rest of each is in its diff.
template <typename Dtype>
inline bool HasRests(const Dtype* sums, int count) {
  const Dtype kExact = 16777216;  // 2^24
  bool has = false;
  for (int i = 0; i < count; ++i) has |= std::fabs(sums[i]) >= kExact;
  return has && sizeof(Dtype) == sizeof(float);
}

}  // namespace caffe

#endif  // CAFFE_LAYERS_INTEGER_LAYER_HPP_
