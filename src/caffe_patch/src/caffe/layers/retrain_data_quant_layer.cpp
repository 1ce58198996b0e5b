#include "caffe/layers/retrain_data_quant_layer.hpp"

#include <algorithm>
#include <string>
#include <vector>

#include "caffe/util/amct_floats.hpp"
#include "caffe/util/amct_record.hpp"

namespace caffe {

template <typename Dtype>
RetrainDataQuantLayer<Dtype>::~RetrainDataQuantLayer() {
  quant_ifmr_free(observer_);
  if (retraining_) retraining_->Leave(this);
}

template <typename Dtype>
string RetrainDataQuantLayer<Dtype>::Where() const {
  return "layer \"" + this->layer_param_.name() + "\" (RetrainDataQuant): ";
}

template <typename Dtype>
void RetrainDataQuantLayer<Dtype>::LayerSetUp(const vector<Blob<Dtype>*>& bottom, const vector<Blob<Dtype>*>& top) {
  CHECK(!options().object_layer().empty()) << Where() << "retrain_data_quant_param needs object_layer";
  CHECK(bottom[0] != top[0]) << Where() << "give its top another name than its bottom";
  CHECK_EQ(quant_check_factors(1, 0, options().num_bits_d()), 0) << Where() << "num_bits_d: " << quant_error();
  const int sizes[] = {1, 1, 2};
  if (this->blobs_.empty()) {
    for (int i = 0; i < 3; ++i) {
      this->blobs_.push_back(shared_ptr<Blob<Dtype> >(new Blob<Dtype>(vector<int>(1, sizes[i]))));
      std::fill_n(this->blobs_[i]->mutable_cpu_data(), sizes[i], Dtype(0));
    }
  }
  CHECK_EQ(this->blobs_.size(), 3) << Where() << "its blobs are two clips and the last legal pair of both";
  const bool trained[] = {true, !options().fixed_min(), false};
  for (int i = this->layer_param_.param_size(); i < 3; ++i) {
    ParamSpec* rate = this->layer_param_.add_param();
    rate->set_lr_mult(trained[i]);
    rate->set_decay_mult(0);
  }
  if (this->phase_ == TEST) retraining_ = amct::Retraining::Join(options().record_file_path(), this);
}

template <typename Dtype>
void RetrainDataQuantLayer<Dtype>::Reshape(const vector<Blob<Dtype>*>& bottom, const vector<Blob<Dtype>*>& top) {
  top[0]->ReshapeLike(*bottom[0]);
  shape_ = bottom[0]->shape();
}

template <typename Dtype>
void RetrainDataQuantLayer<Dtype>::SetClips(float low, float high) {
  this->blobs_[0]->mutable_cpu_data()[0] = high;
  this->blobs_[1]->mutable_cpu_data()[0] = low;
  this->blobs_[2]->mutable_cpu_data()[0] = high;
  this->blobs_[2]->mutable_cpu_data()[1] = low;
}

template <typename Dtype>
bool RetrainDataQuantLayer<Dtype>::PrepareClips(const Blob<Dtype>& bottom) {
  float high = this->blobs_[0]->cpu_data()[0], low = this->blobs_[1]->cpu_data()[0];
  const Dtype* valid = this->blobs_[2]->cpu_data();
  if (valid[0] == valid[1]) {
    if (!FindClips(bottom)) return false;
  } else if (quant_ulq_legal(&low, &high, valid[1], valid[0])) {  // an update made one illegal
    SetClips(low, high);
  } else if (this->phase_ == TRAIN) {
    SetClips(low, high);
  }
  high_ = this->blobs_[0]->cpu_data()[0];
  low_ = options().fixed_min() ? 0 : this->blobs_[1]->cpu_data()[0];
  return true;
}

template <typename Dtype>
bool RetrainDataQuantLayer<Dtype>::FindClips(const Blob<Dtype>& bottom) {
  const bool has_low = options().fixed_min() || options().has_clip_min(), has_high = options().has_clip_max();
  float low = 0, high = 0;
  if (!has_low || !has_high) {
    CHECK_EQ(this->phase_, TRAIN)
        << Where() << "its clips are not known: they are found in the first training batches. Set test_initialization: "
        << "false in the solver; a net that is only tested needs the weights of a snapshot";
    if (!options().clips_from().empty() || !SearchClips(bottom, &low, &high)) return false;
  }
  if (has_high) high = options().clip_max();
  if (options().has_clip_min()) low = options().clip_min();
  if (options().fixed_min()) low = 0;
  SetClips(low, high);
  return true;
}

template <typename Dtype>
bool RetrainDataQuantLayer<Dtype>::SearchClips(const Blob<Dtype>& bottom, float* low, float* high) {
  if (observer_ == NULL) {
    quant_ifmr_settings settings = {static_cast<int>(options().num_bits_d()), 1, 0.7, 1.3, 0.01, 0.999999, 0.999999,
                                    static_cast<int64_t>(options().batch_num())};
    observer_ = quant_ifmr_new(&settings);
    CHECK(observer_ != NULL) << Where() << quant_error();
  }
  const string failure = Where() + "IfmrQuantWithOffset scale is illegal: ";
  const amct::ReadFloats values(bottom.cpu_data(), bottom.count());
  CHECK_EQ(quant_ifmr_observe(observer_, values.data(), bottom.count()), 0) << failure << quant_error();
  if (++batches_ < static_cast<int>(options().batch_num())) return false;
  quant_ifmr_result found;
  CHECK_EQ(quant_ifmr_find(observer_, &found), 0) << failure << quant_error();
  quant_ifmr_free(observer_);
  observer_ = NULL;
  *low = found.clip_min;
  *high = found.clip_max;
  LOG(INFO) << "layer \"" << options().object_layer() << "\": IFMR found the clips " << *high << " and " << *low;
  return true;
}

template <typename Dtype>
void RetrainDataQuantLayer<Dtype>::Forward_cpu(const vector<Blob<Dtype>*>& bottom, const vector<Blob<Dtype>*>& top) {
  const size_t count = bottom[0]->count();
  is_rounded_ = PrepareClips(*bottom[0]);
  if (!is_rounded_) {
    std::copy(bottom[0]->cpu_data(), bottom[0]->cpu_data() + count, top[0]->mutable_cpu_data());
    return;
  }
  const amct::ReadFloats x(bottom[0]->cpu_data(), count);
  amct::WriteFloats y(top[0]->mutable_cpu_data(), count);
  quant_ulq_forward(x.data(), count, low_, high_, options().num_bits_d(), y.data());
  y.Done();
  if (retraining_) retraining_->Report(this);
}

template <typename Dtype>
void RetrainDataQuantLayer<Dtype>::Backward_cpu(const vector<Blob<Dtype>*>& top, const vector<bool>& propagate_down,
                                                const vector<Blob<Dtype>*>& bottom) {
  const size_t count = bottom[0]->count();
  if (!is_rounded_) {
    if (propagate_down[0]) {
      std::copy(top[0]->cpu_diff(), top[0]->cpu_diff() + count, bottom[0]->mutable_cpu_diff());
    }
    return;
  }
  const amct::ReadFloats x(bottom[0]->cpu_data(), count), upstream(top[0]->cpu_diff(), count);
  vector<float> unused;
  float of_low, of_high;
  const int bits = options().num_bits_d();
  if (propagate_down[0]) {
    amct::WriteFloats gradient(bottom[0]->mutable_cpu_diff(), count);
    quant_ulq_backward(x.data(), upstream.data(), count, low_, high_, bits, gradient.data(), &of_low, &of_high);
    gradient.Done();
  } else {
    unused.resize(count);
    quant_ulq_backward(x.data(), upstream.data(), count, low_, high_, bits, unused.data(), &of_low, &of_high);
  }
  if (this->param_propagate_down(0)) this->blobs_[0]->mutable_cpu_diff()[0] += of_high;
  if (this->param_propagate_down(1) && !options().fixed_min()) this->blobs_[1]->mutable_cpu_diff()[0] += of_low;
}

template <typename Dtype>
void RetrainDataQuantLayer<Dtype>::AddFactors(SingleLayerRecord* entry) {
  const Dtype* valid = this->blobs_[2]->cpu_data();
  float high = this->blobs_[0]->cpu_data()[0], low = this->blobs_[1]->cpu_data()[0], scale;
  int32_t offset;
  quant_ulq_legal(&low, &high, valid[1], valid[0]);
  quant_ulq_factors(low, high, options().num_bits_d(), &scale, &offset);
  amct::SetInput(amct::InputFactors(scale, offset, options().index(), options().num_bits_d(), shape_), entry);
}

INSTANTIATE_CLASS(RetrainDataQuantLayer);
REGISTER_LAYER_CLASS(RetrainDataQuant);

}  // namespace caffe
