#ifndef CAFFE_LAYERS_QUANT_LAYER_HPP_
#define CAFFE_LAYERS_QUANT_LAYER_HPP_

#include <vector>

#include "caffe/blob.hpp"
#include "caffe/layer.hpp"
#include "caffe/proto/caffe.pb.h"

namespace caffe {

// Rounds its bottom to the grid of a scale and an offset. The top holds real numbers or, in front of a layer on
// integers, the integers themselves.
template <typename Dtype>
class QuantLayer : public Layer<Dtype> {
 public:
  explicit QuantLayer(const LayerParameter& param) : Layer<Dtype>(param) {}
  virtual void LayerSetUp(const vector<Blob<Dtype>*>& bottom, const vector<Blob<Dtype>*>& top);
  virtual void Reshape(const vector<Blob<Dtype>*>& bottom, const vector<Blob<Dtype>*>& top);
  virtual inline const char* type() const { return "Quant"; }
  virtual inline int ExactNumBottomBlobs() const { return 1; }
  virtual inline int ExactNumTopBlobs() const { return 1; }

 protected:
  virtual void Forward_cpu(const vector<Blob<Dtype>*>& bottom, const vector<Blob<Dtype>*>& top);
  // The gradient passes where the bottom is inside of the range of the integers.
  virtual void Backward_cpu(const vector<Blob<Dtype>*>& top, const vector<bool>& propagate_down,
                            const vector<Blob<Dtype>*>& bottom);

  float scale_;
  int offset_, bits_;
  bool gives_integers_;
};

}  // namespace caffe

#endif  // CAFFE_LAYERS_QUANT_LAYER_HPP_
