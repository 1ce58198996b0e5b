#include "caffe/layers/rounded_data_layer.hpp"

#include <algorithm>
#include <cmath>
#include <vector>

#include "caffe/layer_factory.hpp"
#include "caffe/util/amct_net.hpp"
#include "caffe/util/amct_weights.hpp"
#include "caffe/util/quant.hpp"

namespace caffe {

template <typename Dtype>
void RoundedDataLayer<Dtype>::LayerSetUp(const vector<Blob<Dtype>*>& bottom, const vector<Blob<Dtype>*>& top) {
  LayerParameter plain(this->layer_param_);
  amct::MakePlain(&plain);
  plain_ = LayerRegistry<Dtype>::CreateLayer(plain);
  plain_->SetUp(bottom, top);
  this->blobs_ = plain_->blobs();
  in_.reset(new Blob<double>(bottom[0]->shape()));
  out_.reset(new Blob<double>());
  exact_ = LayerRegistry<double>::CreateLayer(plain);
  exact_->SetUp(vector<Blob<double>*>(1, in_.get()), vector<Blob<double>*>(1, out_.get()));
}

template <typename Dtype>
void RoundedDataLayer<Dtype>::Reshape(const vector<Blob<Dtype>*>& bottom, const vector<Blob<Dtype>*>& top) {
  plain_->Reshape(bottom, top);
}

template <typename Dtype>
void RoundedDataLayer<Dtype>::FindIntegers() {
  vector<vector<Dtype> > now;
  for (size_t i = 0; i < this->blobs_.size(); ++i) {
    const Dtype* values = this->blobs_[i]->cpu_data();
    now.push_back(vector<Dtype>(values, values + this->blobs_[i]->count()));
  }
  if (now == known_) return;
  known_.swap(now);
  const amct::WeightRows layout(plain_->type(), this->layer_param_, this->blobs_[0]->shape());
  const int rows = layout.row_count(), size = layout.row_size();
  const bool has_bias = this->blobs_.size() > 1;
  vector<float> values(this->blobs_[0]->count()), scales(rows);
  layout.Gather(this->blobs_[0]->cpu_data(), values.data());
  vector<float> bias;
  if (has_bias) bias.assign(known_[1].begin(), known_[1].end());
  const float* given = has_bias ? bias.data() : NULL;
  vector<int8_t> integers(values.size());
  size_t scale_count = 0;
  const IntegerParameter& data = this->layer_param_.integer_param();
  is_on_grid_ = quant_find_integers(values.data(), rows, size, given, data.input(0).scale(), integers.data(),
                                    scales.data(), &scale_count) == 0;
  if (!is_on_grid_) return;
  layout.Scatter(integers.data(), exact_->blobs()[0]->mutable_cpu_data());
  bias_.assign(rows, 0);
  steps_.assign(data.input_size(), vector<float>(rows));
  for (int i = 0; i < data.input_size(); ++i) {  // the file holds the bias in steps of the first bottom
    quant_sum_steps(integers.data(), rows, size, scales.data(), scale_count, i == 0 ? given : NULL,
                    data.input(i).scale(), i == 0 && has_bias ? bias_.data() : NULL, steps_[i].data());
  }
}

template <typename Dtype>
bool RoundedDataLayer<Dtype>::FindData(const Blob<Dtype>& bottom, int index) {
  const float scale = this->layer_param_.integer_param().input(index).scale();
  in_->Reshape(bottom.shape());
  const Dtype* values = bottom.cpu_data();
  double* integers = in_->mutable_cpu_data();
  for (int i = 0; i < bottom.count(); ++i) {
    integers[i] = std::nearbyint(static_cast<float>(values[i]) / scale);
    if (!std::isfinite(integers[i])) return false;
  }
  return true;
}

template <typename Dtype>
void RoundedDataLayer<Dtype>::WriteReal(int index, Blob<Dtype>* top) const {
  // The outputs of an InnerProduct are its last axis, those of a convolution the second one.
  const int inner = this->layer_param_.has_inner_product_param() ? 1 : top->count(2);
  const int rows = steps_[index].size();
  const Dtype* added = index > 0 && this->blobs_.size() > 1 ? this->blobs_[1]->cpu_data() : NULL;
  const double* sums = out_->cpu_data();
  Dtype* real = top->mutable_cpu_data();
  for (int i = 0; i < top->count(); ++i) {
    const int row = i / inner % rows;
    const double value = sums[i] * static_cast<double>(steps_[index][row]);
    real[i] = static_cast<float>(added == NULL ? value : value + added[row]);
  }
}

template <typename Dtype>
void RoundedDataLayer<Dtype>::Forward_cpu(const vector<Blob<Dtype>*>& bottom, const vector<Blob<Dtype>*>& top) {
  FindIntegers();
  for (size_t i = 0; i < bottom.size() && is_on_grid_; ++i) {
    if (!FindData(*bottom[i], i)) break;
    const vector<Blob<double>*> in(1, in_.get()), out(1, out_.get());
    if (exact_->blobs().size() > 1) {
      double* bias = exact_->blobs()[1]->mutable_cpu_data();
      for (size_t j = 0; j < bias_.size(); ++j) bias[j] = i == 0 ? bias_[j] : 0;
    }
    exact_->Reshape(in, out);
    exact_->Forward(in, out);
    WriteReal(i, top[i]);
    if (i + 1 == bottom.size()) return;
  }
  plain_->Forward(bottom, top);
}

template <typename Dtype>
void RoundedDataLayer<Dtype>::Backward_cpu(const vector<Blob<Dtype>*>& top, const vector<bool>& propagate_down,
                                           const vector<Blob<Dtype>*>& bottom) {
  for (size_t i = 0; i < this->blobs_.size(); ++i) {
    plain_->set_param_propagate_down(i, this->param_propagate_down(i));
  }
  plain_->Backward(top, propagate_down, bottom);
}

template <typename Dtype>
void RoundedDataLayer<Dtype>::ToProto(LayerParameter* param, bool write_diff) {
  Layer<Dtype>::ToProto(param, write_diff);
  amct::MakePlain(param);
}

INSTANTIATE_CLASS(RoundedDataLayer);

}  // namespace caffe
