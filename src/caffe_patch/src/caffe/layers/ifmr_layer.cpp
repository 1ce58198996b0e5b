#include <vector>

#include "caffe/layers/ifmr_layer.hpp"
#include "caffe/util/amct_floats.hpp"

namespace caffe {

template <typename Dtype>
void IFMRLayer<Dtype>::LayerSetUp(const vector<Blob<Dtype>*>& bottom, const vector<Blob<Dtype>*>& top) {
  watched_.reset(new amct::Watched(this->layer_param_.name(), this->layer_param_.ifmr_param()));
  calibration_ = amct::Calibration::Join(watched_);
}

template <typename Dtype>
void IFMRLayer<Dtype>::Forward_cpu(const vector<Blob<Dtype>*>& bottom, const vector<Blob<Dtype>*>& top) {
  const size_t count = bottom[0]->count();
  const amct::ReadFloats values(bottom[0]->cpu_data(), count);
  calibration_->Observe(watched_.get(), values.data(), count, bottom[0]->shape());
}

INSTANTIATE_CLASS(IFMRLayer);
REGISTER_LAYER_CLASS(IFMR);

}  // namespace caffe
