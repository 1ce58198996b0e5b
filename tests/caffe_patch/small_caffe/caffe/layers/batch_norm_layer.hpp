#pragma once
#include <cmath>
#include <vector>

#include "caffe/layer.hpp"
#include "caffe/util/quant.hpp"

namespace caffe {

// The members that a derived layer relies on; the statistics are those of the library under test.
template <typename Dtype>
class BatchNormLayer : public Layer<Dtype> {
 public:
  typedef vector<Blob<Dtype>*> Blobs;

  explicit BatchNormLayer(const LayerParameter& param) : Layer<Dtype>(param) {}
  virtual void LayerSetUp(const Blobs& bottom, const Blobs&) {
    const BatchNormParameter& options = this->layer_param_.batch_norm_param();
    moving_average_fraction_ = options.moving_average_fraction();
    eps_ = options.eps();
    use_global_stats_ = options.has_use_global_stats() ? options.use_global_stats() : this->phase_ == TEST;
    channels_ = bottom[0]->shape(1);
    for (int size : {channels_, channels_, 1}) this->blobs_.emplace_back(new Blob<Dtype>(vector<int>(1, size)));
  }
  virtual void Reshape(const Blobs& bottom, const Blobs& top) { top[0]->ReshapeLike(*bottom[0]); }
  virtual const char* type() const { return "BatchNorm"; }

 protected:
  virtual void Forward_cpu(const Blobs& bottom, const Blobs& top) {
    const int samples = bottom[0]->shape(0), inner = bottom[0]->count(2);
    const vector<float> x(bottom[0]->cpu_data(), bottom[0]->cpu_data() + bottom[0]->count());
    vector<float> mean(channels_), variance(channels_);
    float weight = 0;
    quant_bn_update(x.data(), samples, channels_, inner, 0, mean.data(), variance.data(), &weight);
    const Dtype correction = samples * inner > 1 ? Dtype(samples * inner) / (samples * inner - 1) : 1;
    Dtype* blobs[] = {this->blobs_[0]->mutable_cpu_data(), this->blobs_[1]->mutable_cpu_data(),
                      this->blobs_[2]->mutable_cpu_data()};
    for (int c = 0; c < channels_ && !use_global_stats_; ++c) {
      blobs[0][c] = blobs[0][c] * moving_average_fraction_ + mean[c];
      blobs[1][c] = blobs[1][c] * moving_average_fraction_ + variance[c];
      variance[c] /= correction;
    }
    if (!use_global_stats_) blobs[2][0] = blobs[2][0] * moving_average_fraction_ + 1;
    for (int i = 0; i < bottom[0]->count(); ++i) {
      const int c = i / inner % channels_;
      const Dtype center = use_global_stats_ ? blobs[0][c] / blobs[2][0] : mean[c];
      const Dtype spread = use_global_stats_ ? blobs[1][c] / blobs[2][0] : variance[c];
      top[0]->mutable_cpu_data()[i] = (x[i] - center) / std::sqrt(spread + eps_);
    }
  }
  virtual void Backward_cpu(const Blobs&, const vector<bool>&, const Blobs&) {}

  bool use_global_stats_;
  Dtype moving_average_fraction_, eps_;
  int channels_;
};

}  // namespace caffe
