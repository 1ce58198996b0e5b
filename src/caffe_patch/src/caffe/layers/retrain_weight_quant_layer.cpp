#include "caffe/layers/retrain_weight_quant_layer.hpp"

#include <string>
#include <vector>

#include "caffe/layer_factory.hpp"
#include "caffe/util/amct_net.hpp"
#include "caffe/util/amct_weights.hpp"
#include "caffe/util/quant.hpp"

namespace caffe {

template <typename Dtype>
RoundedWeightsLayer<Dtype>::~RoundedWeightsLayer() {
  if (retraining_) retraining_->Leave(this);
}

template <typename Dtype>
void RoundedWeightsLayer<Dtype>::LayerSetUp(const vector<Blob<Dtype>*>& bottom, const vector<Blob<Dtype>*>& top) {
  LayerParameter plain(this->layer_param_);
  amct::MakePlain(&plain);
  inner_ = LayerRegistry<Dtype>::CreateLayer(plain);
  inner_->SetUp(bottom, top);
  CHECK(!inner_->blobs().empty()) << "layer \"" << plain.name() << "\" (" << plain.type()
                                  << "): it has no weights that a RetrainWeightQuant could round";
  this->blobs_ = inner_->blobs();  // all but the weight are the same blobs
  this->blobs_[0].reset(new Blob<Dtype>());
  this->blobs_[0]->CopyFrom(*inner_->blobs()[0], false, true);
  const RetrainWeightQuantParameter& options = this->layer_param_.retrain_weight_quant_param();
  CHECK_EQ(quant_check_factors(1, 0, options.num_bits_w()), 0)
      << "layer \"" << plain.name() << "\": num_bits_w: " << quant_error();
  if (this->phase_ == TEST) retraining_ = amct::Retraining::Join(options.record_file_path(), this);
}

template <typename Dtype>
void RoundedWeightsLayer<Dtype>::Reshape(const vector<Blob<Dtype>*>& bottom, const vector<Blob<Dtype>*>& top) {
  inner_->Reshape(bottom, top);
}

template <typename Dtype>
void RoundedWeightsLayer<Dtype>::FindScales(vector<float>* rows, vector<float>* scales) const {
  const RetrainWeightQuantParameter& options = this->layer_param_.retrain_weight_quant_param();
  const amct::WeightRows layout(inner_->type(), this->layer_param_, this->blobs_[0]->shape());
  const bool channel_wise = options.channel_wise() && layout.has_channel_scales();
  rows->resize(this->blobs_[0]->count());
  scales->resize(channel_wise ? layout.row_count() : 1);
  layout.Gather(this->blobs_[0]->cpu_data(), rows->data());
  CHECK_EQ(quant_arq(rows->data(), layout.row_count(), layout.row_size(), options.num_bits_w(), channel_wise,
                     scales->data()),
           0)
      << "layer \"" << this->layer_param_.name() << "\": " << quant_error();
}

template <typename Dtype>
void RoundedWeightsLayer<Dtype>::RoundWeight() {
  vector<float> rows, scales;
  FindScales(&rows, &scales);
  const amct::WeightRows layout(inner_->type(), this->layer_param_, this->blobs_[0]->shape());
  quant_fake_rows(rows.data(), layout.row_count(), layout.row_size(),
                  this->layer_param_.retrain_weight_quant_param().num_bits_w(), scales.data(), scales.size(),
                  rows.data());
  layout.Scatter(rows.data(), inner_->blobs()[0]->mutable_cpu_data());
}

template <typename Dtype>
void RoundedWeightsLayer<Dtype>::Forward_cpu(const vector<Blob<Dtype>*>& bottom, const vector<Blob<Dtype>*>& top) {
  RoundWeight();
  inner_->Forward(bottom, top);
  if (retraining_) retraining_->Report(this);
}

template <typename Dtype>
void RoundedWeightsLayer<Dtype>::Backward_cpu(const vector<Blob<Dtype>*>& top, const vector<bool>& propagate_down,
                                              const vector<Blob<Dtype>*>& bottom) {
  inner_->blobs()[0]->ShareDiff(*this->blobs_[0]);  // the gradient of the rounded weight is that of the weight
  for (size_t i = 0; i < this->blobs_.size(); ++i) {
    inner_->set_param_propagate_down(i, this->param_propagate_down(i));
  }
  inner_->Backward(top, propagate_down, bottom);
}

template <typename Dtype>
void RoundedWeightsLayer<Dtype>::ToProto(LayerParameter* param, bool write_diff) {
  Layer<Dtype>::ToProto(param, write_diff);
  amct::MakePlain(param);
}

template <typename Dtype>
void RoundedWeightsLayer<Dtype>::AddFactors(SingleLayerRecord* entry) {
  vector<float> rows, scales;
  FindScales(&rows, &scales);
  for (size_t i = 0; i < scales.size(); ++i) {
    entry->add_scale_w(scales[i]);
    entry->add_offset_w(0);
  }
  entry->set_num_bits_w(this->layer_param_.retrain_weight_quant_param().num_bits_w());
}

INSTANTIATE_CLASS(RetrainWeightQuantLayer);
REGISTER_LAYER_CLASS(RetrainWeightQuant);
INSTANTIATE_CLASS(RoundedWeightsLayer);

}  // namespace caffe
