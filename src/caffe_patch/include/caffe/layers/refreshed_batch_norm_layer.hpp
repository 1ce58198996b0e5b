#ifndef CAFFE_LAYERS_REFRESHED_BATCH_NORM_LAYER_HPP_
#define CAFFE_LAYERS_REFRESHED_BATCH_NORM_LAYER_HPP_

#include <vector>

#include "caffe/layers/batch_norm_layer.hpp"

namespace caffe {

// A BatchNorm that normalizes update_iterations batches by their own statistics, then writes the moving averages to a
// file of dump_dir and uses them.
template <typename Dtype>
class RefreshedBatchNormLayer : public BatchNormLayer<Dtype> {
 public:
  explicit RefreshedBatchNormLayer(const LayerParameter& param) : BatchNormLayer<Dtype>(param), done_(0) {}
  virtual void LayerSetUp(const vector<Blob<Dtype>*>& bottom, const vector<Blob<Dtype>*>& top);
  virtual void ToProto(LayerParameter* param, bool write_diff = false);

 protected:
  virtual void Forward_cpu(const vector<Blob<Dtype>*>& bottom, const vector<Blob<Dtype>*>& top);
  // The moving averages are computed on the CPU; they are needed there.
  virtual void Forward_gpu(const vector<Blob<Dtype>*>& bottom, const vector<Blob<Dtype>*>& top) {
    Forward_cpu(bottom, top);
  }

 private:
  void Dump();

  int done_;
};

}  // namespace caffe

#endif  // CAFFE_LAYERS_REFRESHED_BATCH_NORM_LAYER_HPP_
