#pragma once
#include <map>
#include <string>
#include <vector>

#include "caffe/blob.hpp"

namespace caffe {

template <typename Dtype>
class Layer {
 public:
  typedef vector<Blob<Dtype>*> Blobs;

  explicit Layer(const LayerParameter& param) : layer_param_(param), phase_(param.phase()) {}
  virtual ~Layer() {}

  void SetUp(const Blobs& bottom, const Blobs& top) {
    CHECK(ExactNumBottomBlobs() < 0 || ExactNumBottomBlobs() == static_cast<int>(bottom.size())) << "number of bottoms";
    CHECK(ExactNumTopBlobs() < 0 || ExactNumTopBlobs() == static_cast<int>(top.size())) << "number of tops";
    LayerSetUp(bottom, top);
    Reshape(bottom, top);
  }
  virtual void LayerSetUp(const Blobs&, const Blobs&) {}
  virtual void Reshape(const Blobs& bottom, const Blobs& top) = 0;
  Dtype Forward(const Blobs& bottom, const Blobs& top) {
    Reshape(bottom, top);
    Forward_cpu(bottom, top);
    return 0;
  }
  void Backward(const Blobs& top, const vector<bool>& propagate_down, const Blobs& bottom) {
    Backward_cpu(top, propagate_down, bottom);
  }
  virtual void ToProto(LayerParameter* param, bool write_diff = false) {
    param->CopyFrom(layer_param_);
    param->clear_blobs();
    for (const auto& blob : blobs_) blob->ToProto(param->add_blobs(), write_diff);
  }

  vector<shared_ptr<Blob<Dtype> > >& blobs() { return blobs_; }
  const LayerParameter& layer_param() const { return layer_param_; }
  virtual const char* type() const { return ""; }
  virtual int ExactNumBottomBlobs() const { return -1; }
  virtual int ExactNumTopBlobs() const { return -1; }
  virtual bool AllowForceBackward(const int) const { return true; }
  bool param_propagate_down(size_t i) { return i < param_propagate_down_.size() && param_propagate_down_[i]; }
  void set_param_propagate_down(size_t i, bool value) {
    if (param_propagate_down_.size() <= i) param_propagate_down_.resize(i + 1, true);
    param_propagate_down_[i] = value;
  }

 protected:
  virtual void Forward_cpu(const Blobs& bottom, const Blobs& top) = 0;
  virtual void Forward_gpu(const Blobs& bottom, const Blobs& top) { Forward_cpu(bottom, top); }
  virtual void Backward_cpu(const Blobs& top, const vector<bool>& propagate_down, const Blobs& bottom) = 0;

  LayerParameter layer_param_;
  Phase phase_;
  vector<shared_ptr<Blob<Dtype> > > blobs_;
  vector<bool> param_propagate_down_;
};

}  // namespace caffe

#include "caffe/layer_factory.hpp"
