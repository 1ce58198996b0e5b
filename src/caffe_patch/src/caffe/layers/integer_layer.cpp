#include "caffe/layers/integer_layer.hpp"

#include <algorithm>
#include <string>
#include <vector>

#include "caffe/layer_factory.hpp"
#include "caffe/util/amct_net.hpp"
#include "caffe/util/amct_weights.hpp"
#include "caffe/util/quant.hpp"

namespace caffe {

namespace {

const int kTable = 16;  // values that 4 bits choose from

// The numbers of a stored blob, whatever their type.
vector<double> NumbersOf(const BlobProto& blob) {
  vector<double> numbers;
  const string& bytes = blob.int8_data();
  for (size_t i = 0; i < bytes.size(); ++i) numbers.push_back(static_cast<signed char>(bytes[i]));
  for (int i = 0; i < blob.int32_data_size(); ++i) numbers.push_back(blob.int32_data(i));
  for (int i = 0; i < blob.data_size(); ++i) numbers.push_back(blob.data(i));
  for (int i = 0; i < blob.double_data_size(); ++i) numbers.push_back(blob.double_data(i));
  return numbers;
}

template <typename Dtype>
void Fill(const vector<double>& numbers, const string& layer, Blob<Dtype>* blob) {
  CHECK_EQ(numbers.size(), blob->count()) << "layer \"" << layer << "\": the caffemodel has " << numbers.size()
                                          << " values for a blob of shape " << blob->shape_string();
  std::copy(numbers.begin(), numbers.end(), blob->mutable_cpu_data());
}

}  // namespace

template <typename Dtype>
void IntegerLayer<Dtype>::LayerSetUp(const vector<Blob<Dtype>*>& bottom, const vector<Blob<Dtype>*>& top) {
  LayerParameter plain(this->layer_param_);
  amct::MakePlain(&plain);
  type_ = plain.type();
  const string where = "layer \"" + plain.name() + "\" (" + type_ + "): ";
  CHECK_EQ(this->layer_param_.integer_param().input_size(), bottom.size())
      << where << "in a deploy model each bottom comes from a Quant layer that has this layer's name as object_layer";
  CHECK_EQ(top.size(), bottom.size()) << where << "on integers it needs as many tops as bottoms";
  inner_.clear();
  this->blobs_.clear();
  for (size_t i = 0; i < bottom.size(); ++i) {
    in_.push_back(shared_ptr<Blob<double> >(new Blob<double>(bottom[i]->shape())));
    out_.push_back(shared_ptr<Blob<double> >(new Blob<double>()));
    inner_.push_back(LayerRegistry<double>::CreateLayer(plain));
    inner_[i]->SetUp(Blobs(1, in_[i].get()), Blobs(1, out_[i].get()));
    const vector<shared_ptr<Blob<double> > >& own = inner_[i]->blobs();
    CHECK(own.size() == 1 || own.size() == 2) << where << "on integers it can have a weight and a bias, it has "
                                              << own.size() << " blobs";
    has_bias_ = own.size() > 1;
    if (i > 0) own[0]->ShareData(*inner_[0]->blobs()[0]);
    for (size_t j = i > 0; j < own.size(); ++j) {  // one weight, and a bias for each bottom
      this->blobs_.push_back(shared_ptr<Blob<Dtype> >(new Blob<Dtype>(own[j]->shape())));
    }
  }
}

template <typename Dtype>
void IntegerLayer<Dtype>::Reshape(const vector<Blob<Dtype>*>& bottom, const vector<Blob<Dtype>*>& top) {
  for (size_t i = 0; i < bottom.size(); ++i) {
    in_[i]->Reshape(bottom[i]->shape());
    inner_[i]->Reshape(Blobs(1, in_[i].get()), Blobs(1, out_[i].get()));
    top[i]->Reshape(out_[i]->shape());
  }
}

template <typename Dtype>
void IntegerLayer<Dtype>::Load(const LayerParameter& source) {
  const string& name = this->layer_param_.name();
  const int plain = this->blobs_.size(), found = source.blobs_size();
  CHECK(found == plain || found == plain + 1)
      << "layer \"" << name << "\" (" << type_ << "): a deploy model has " << plain << " blobs for it, or " << plain + 1
      << " with 4-bit weights; the caffemodel has " << found;
  LoadWeight(source.blobs(0), found > plain ? &source.blobs(found - 1) : NULL);
  for (int i = 1; i < plain; ++i) {
    const vector<double> bias = NumbersOf(source.blobs(i));
    Fill(bias, name, this->blobs_[i].get());
    Fill(bias, name, inner_[i - 1]->blobs()[1].get());
  }
  loaded_.mutable_blobs()->CopyFrom(source.blobs());
  is_loaded_ = true;
}

template <typename Dtype>
void IntegerLayer<Dtype>::LoadWeight(const BlobProto& stored, const BlobProto* table) {
  const string& name = this->layer_param_.name();
  Blob<double>* weight = inner_[0]->blobs()[0].get();
  vector<double> numbers = NumbersOf(stored);
  if (table != NULL) {
    const amct::WeightRows layout(type_, this->layer_param_, weight->shape());
    const int rows = layout.row_count(), size = layout.row_size();
    const vector<double> values = NumbersOf(*table);
    CHECK(values.size() == kTable || values.size() == static_cast<size_t>(kTable * rows))
        << "layer \"" << name << "\": a table of 4-bit weights has " << kTable << " values, or so many for each of the "
        << rows << " outputs; the caffemodel has " << values.size();
    CHECK_EQ(numbers.size(), static_cast<size_t>(rows) * ((size + 1) / 2))
        << "layer \"" << name << "\": the indices of 4-bit weights do not fit the shape " << weight->shape_string();
    vector<uint8_t> packed(numbers.size());
    for (size_t i = 0; i < numbers.size(); ++i) packed[i] = static_cast<uint8_t>(static_cast<int>(numbers[i]));
    const vector<int8_t> tables(values.begin(), values.end());
    vector<int8_t> decoded(static_cast<size_t>(rows) * size);
    quant_snq_decode(packed.data(), rows, size, tables.data(), tables.size() / kTable, decoded.data());
    numbers.resize(decoded.size());
    layout.Scatter(decoded.data(), numbers.data());
  }
  Fill(numbers, name, weight);
  Fill(numbers, name, this->blobs_[0].get());
}

template <typename Dtype>
void IntegerLayer<Dtype>::Forward_cpu(const vector<Blob<Dtype>*>& bottom, const vector<Blob<Dtype>*>& top) {
  CHECK(is_loaded_) << "layer \"" << this->layer_param_.name() << "\" (" << type_
                    << "): the weights of a deploy model are needed: load its caffemodel";
  for (size_t i = 0; i < bottom.size(); ++i) {
    const Dtype* integers = bottom[i]->cpu_data();
    const double offset = this->layer_param_.integer_param().input(i).offset();
    double* moved = in_[i]->mutable_cpu_data();
    for (int j = 0; j < bottom[i]->count(); ++j) moved[j] = integers[j] - offset;
    inner_[i]->Forward(Blobs(1, in_[i].get()), Blobs(1, out_[i].get()));
    const double* sums = out_[i]->cpu_data();
    Dtype* out = top[i]->mutable_cpu_data();
    const int count = top[i]->count();
    for (int j = 0; j < count; ++j) out[j] = static_cast<Dtype>(sums[j]);
    if (!HasRests(out, count)) continue;
    Dtype* rests = top[i]->mutable_cpu_diff();
    for (int j = 0; j < count; ++j) rests[j] = static_cast<Dtype>(sums[j] - out[j]);
  }
}

template <typename Dtype>
void IntegerLayer<Dtype>::Backward_cpu(const vector<Blob<Dtype>*>& top, const vector<bool>& propagate_down,
                                       const vector<Blob<Dtype>*>& bottom) {
  LOG(FATAL) << "layer \"" << this->layer_param_.name()
             << "\": a deploy model has no gradients; train the model with RetrainDataQuant";
}

template <typename Dtype>
void IntegerLayer<Dtype>::ToProto(LayerParameter* param, bool write_diff) {
  param->CopyFrom(this->layer_param_);
  amct::MakePlain(param);
  param->mutable_blobs()->CopyFrom(loaded_.blobs());
}

INSTANTIATE_CLASS(IntegerLayer);

}  // namespace caffe
