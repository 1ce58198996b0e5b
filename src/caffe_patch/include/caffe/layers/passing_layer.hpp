#ifndef CAFFE_LAYERS_PASSING_LAYER_HPP_
#define CAFFE_LAYERS_PASSING_LAYER_HPP_

#include <vector>

#include "caffe/blob.hpp"
#include "caffe/layer.hpp"
#include "caffe/proto/caffe.pb.h"

namespace caffe {

// A layer whose top is its bottom: the same memory, forward and backward.
template <typename Dtype>
class PassingLayer : public Layer<Dtype> {
 public:
  explicit PassingLayer(const LayerParameter& param) : Layer<Dtype>(param) {}
  virtual void Reshape(const vector<Blob<Dtype>*>& bottom, const vector<Blob<Dtype>*>& top) {
    if (bottom[0] == top[0]) return;
    top[0]->ReshapeLike(*bottom[0]);
    top[0]->ShareData(*bottom[0]);
    top[0]->ShareDiff(*bottom[0]);
  }
  virtual inline int ExactNumBottomBlobs() const { return 1; }
  virtual inline int ExactNumTopBlobs() const { return 1; }

 protected:
  virtual void Forward_cpu(const vector<Blob<Dtype>*>& bottom, const vector<Blob<Dtype>*>& top) {}
  virtual void Backward_cpu(const vector<Blob<Dtype>*>& top, const vector<bool>& propagate_down,
                            const vector<Blob<Dtype>*>& bottom) {}
};

// Behind a layer without weights of a deploy model. The Quant layers in front of that layer give real numbers on the
// grid of the integers (see amct_net.hpp), so there is nothing left to do.
template <typename Dtype>
class AntiQuantLayer : public PassingLayer<Dtype> {
 public:
  explicit AntiQuantLayer(const LayerParameter& param) : PassingLayer<Dtype>(param) {}
  virtual inline const char* type() const { return "AntiQuant"; }
};

// Searches nothing: shift bits are not used any more. Models that hold it run.
template <typename Dtype>
class SearchNLayer : public PassingLayer<Dtype> {
 public:
  explicit SearchNLayer(const LayerParameter& param) : PassingLayer<Dtype>(param) {}
  virtual inline const char* type() const { return "SearchN"; }
};

}  // namespace caffe

#endif  // CAFFE_LAYERS_PASSING_LAYER_HPP_
