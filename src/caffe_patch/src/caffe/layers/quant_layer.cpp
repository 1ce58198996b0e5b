#include <algorithm>
#include <vector>

#include "caffe/layers/quant_layer.hpp"
#include "caffe/util/amct_floats.hpp"
#include "caffe/util/quant.hpp"

namespace caffe {

template <typename Dtype>
void QuantLayer<Dtype>::LayerSetUp(const vector<Blob<Dtype>*>& bottom, const vector<Blob<Dtype>*>& top) {
  const QuantParameter& options = this->layer_param_.quant_param();
  const char* name = this->layer_param_.name().c_str();
  CHECK(bottom[0] != top[0]) << "layer \"" << name << "\" (Quant): give its top another name than its bottom; the "
                             << "gradient needs the values before rounding";
  scale_ = options.scale();
  offset_ = options.offset();
  bits_ = options.num_bits_d() ? options.num_bits_d() : 8;
  gives_integers_ = options.integers();
  CHECK_EQ(quant_check_factors(scale_, offset_, bits_), 0)
      << "layer \"" << name << "\" (Quant): quant_param: " << quant_error();
}

template <typename Dtype>
void QuantLayer<Dtype>::Reshape(const vector<Blob<Dtype>*>& bottom, const vector<Blob<Dtype>*>& top) {
  top[0]->ReshapeLike(*bottom[0]);
}

template <typename Dtype>
void QuantLayer<Dtype>::Forward_cpu(const vector<Blob<Dtype>*>& bottom, const vector<Blob<Dtype>*>& top) {
  const size_t count = bottom[0]->count();
  const amct::ReadFloats x(bottom[0]->cpu_data(), count);
  if (gives_integers_) {
    std::vector<int32_t> integers(count);
    CHECK_EQ(quant_quantize(x.data(), count, scale_, offset_, bits_, integers.data()), 0)
        << "layer \"" << this->layer_param_.name() << "\" (Quant): " << quant_error();
    std::copy(integers.begin(), integers.end(), top[0]->mutable_cpu_data());
  } else {
    amct::WriteFloats y(top[0]->mutable_cpu_data(), count);
    quant_fake(x.data(), count, scale_, offset_, bits_, y.data());
    y.Done();
  }
}

template <typename Dtype>
void QuantLayer<Dtype>::Backward_cpu(const vector<Blob<Dtype>*>& top, const vector<bool>& propagate_down,
                                     const vector<Blob<Dtype>*>& bottom) {
  if (!propagate_down[0]) return;
  CHECK(!gives_integers_) << "layer \"" << this->layer_param_.name() << "\" (Quant): integers have no gradient";
  const size_t count = bottom[0]->count();
  const amct::ReadFloats x(bottom[0]->cpu_data(), count), upstream(top[0]->cpu_diff(), count);
  amct::WriteFloats gradient(bottom[0]->mutable_cpu_diff(), count);
  quant_fake_gradient(x.data(), upstream.data(), count, scale_, offset_, bits_, gradient.data());
  gradient.Done();
}

INSTANTIATE_CLASS(QuantLayer);
REGISTER_LAYER_CLASS(Quant);

}  // namespace caffe
