#include <vector>

#include "caffe/layers/dequant_layer.hpp"
#include "caffe/layers/integer_layer.hpp"

namespace caffe {

template <typename Dtype>
void DeQuantLayer<Dtype>::LayerSetUp(const vector<Blob<Dtype>*>& bottom, const vector<Blob<Dtype>*>& top) {
  const bool channel_wise = this->layer_param_.dequant_param().channel_wise();
  CHECK(!channel_wise || bottom[0]->num_axes() > 1)
      << "layer \"" << this->layer_param_.name() << "\" (DeQuant): channel_wise needs a bottom with channels";
  if (this->blobs_.empty()) {
    this->blobs_.resize(1);
    this->blobs_[0].reset(new Blob<Dtype>(vector<int>(1, channel_wise ? bottom[0]->shape(1) : 1)));
    Dtype* scales = this->blobs_[0]->mutable_cpu_data();
    for (int i = 0; i < this->blobs_[0]->count(); ++i) scales[i] = 1;
  }
  const int count = this->blobs_[0]->count();
  CHECK(count == 1 || (bottom[0]->num_axes() > 1 && count == bottom[0]->shape(1)))
      << "layer \"" << this->layer_param_.name() << "\" (DeQuant): " << count << " scales do not fit the bottom "
      << bottom[0]->shape_string();
}

template <typename Dtype>
void DeQuantLayer<Dtype>::Reshape(const vector<Blob<Dtype>*>& bottom, const vector<Blob<Dtype>*>& top) {
  top[0]->ReshapeLike(*bottom[0]);
}

template <typename Dtype>
void DeQuantLayer<Dtype>::Forward_cpu(const vector<Blob<Dtype>*>& bottom, const vector<Blob<Dtype>*>& top) {
  const int count = bottom[0]->count(), scale_count = this->blobs_[0]->count();
  const int inner = scale_count == 1 ? count : bottom[0]->count(2);
  const Dtype* sums = bottom[0]->cpu_data();
  const Dtype* rests = HasRests(sums, count) ? bottom[0]->cpu_diff() : NULL;
  const Dtype* scales = this->blobs_[0]->cpu_data();
  Dtype* out = top[0]->mutable_cpu_data();
  for (int i = 0; i < count; ++i) {
    const double scale = scales[scale_count == 1 ? 0 : i / inner % scale_count];
    const double sum = static_cast<double>(sums[i]) + (rests == NULL ? 0 : static_cast<double>(rests[i]));
    out[i] = static_cast<float>(sum * scale);
  }
}

template <typename Dtype>
void DeQuantLayer<Dtype>::Backward_cpu(const vector<Blob<Dtype>*>& top, const vector<bool>& propagate_down,
                                       const vector<Blob<Dtype>*>& bottom) {
  CHECK(!propagate_down[0]) << "layer \"" << this->layer_param_.name()
                            << "\" (DeQuant): a deploy model has no gradients; train the model with RetrainDataQuant";
}

INSTANTIATE_CLASS(DeQuantLayer);
REGISTER_LAYER_CLASS(DeQuant);

}  // namespace caffe
