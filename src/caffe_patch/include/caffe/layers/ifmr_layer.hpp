#ifndef CAFFE_LAYERS_IFMR_LAYER_HPP_
#define CAFFE_LAYERS_IFMR_LAYER_HPP_

#include <vector>

#include "caffe/layers/passing_layer.hpp"
#include "caffe/util/amct_calibration.hpp"

namespace caffe {

// Passes its bottom through and observes it. When all IFMR layers of the record file have seen their batches, the
// factors of all of them are written at once.
template <typename Dtype>
class IFMRLayer : public PassingLayer<Dtype> {
 public:
  explicit IFMRLayer(const LayerParameter& param) : PassingLayer<Dtype>(param) {}
  virtual void LayerSetUp(const vector<Blob<Dtype>*>& bottom, const vector<Blob<Dtype>*>& top);
  virtual inline const char* type() const { return "IFMR"; }

 protected:
  virtual void Forward_cpu(const vector<Blob<Dtype>*>& bottom, const vector<Blob<Dtype>*>& top);

  boost::shared_ptr<amct::Watched> watched_;
  boost::shared_ptr<amct::Calibration> calibration_;
};

}  // namespace caffe

#endif  // CAFFE_LAYERS_IFMR_LAYER_HPP_
