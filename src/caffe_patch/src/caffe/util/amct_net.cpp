#include "caffe/util/amct_net.hpp"

#include <map>
#include <string>
#include <vector>

#include "caffe/layer_factory.hpp"
#include "caffe/layers/integer_layer.hpp"
#include "caffe/layers/refreshed_batch_norm_layer.hpp"
#include "caffe/layers/retrain_weight_quant_layer.hpp"
#include "caffe/layers/rounded_data_layer.hpp"

namespace caffe {
namespace amct {

namespace {

const char kOnIntegers[] = " on integers";
const char kOnRounded[] = " on rounded data";
const char kRounded[] = " with rounded weights";
const char kRefreshed[] = " with refreshed statistics";

typedef std::map<std::string, std::map<int, QuantParameter> > Inputs;

template <typename Dtype, template <typename> class Kind>
shared_ptr<Layer<Dtype> > Create(const LayerParameter& param) {
  return shared_ptr<Layer<Dtype> >(new Kind<Dtype>(param));
}

// The type that knows of the others; it is registered when it is first needed, for there is one for each plain type.
template <typename Dtype, template <typename> class Kind>
void Change(const char* suffix, LayerParameter* layer) {
  layer->set_type(layer->type() + suffix);
  if (LayerRegistry<Dtype>::Registry().count(layer->type()) == 0) {
    LayerRegistry<Dtype>::AddCreator(layer->type(), &Create<Dtype, Kind>);
  }
}

bool EndsWith(const std::string& text, const std::string& end) {
  return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

// The factors of the inputs of a layer on integers, in order.
void SetInputs(const std::map<int, QuantParameter>& inputs, LayerParameter* layer) {
  layer->clear_integer_param();
  for (std::map<int, QuantParameter>::const_iterator i = inputs.begin(); i != inputs.end(); ++i) {
    layer->mutable_integer_param()->add_input()->CopyFrom(i->second);
  }
}

template <typename Dtype>
void SetRounding(const LayerParameter& rounding, NetParameter* net) {
  const std::string& target = rounding.retrain_weight_quant_param().object_layer();
  const std::string where = "layer \"" + rounding.name() + "\" (RetrainWeightQuant): ";
  CHECK(!target.empty()) << where << "retrain_weight_quant_param needs object_layer";
  for (int i = 0; i < net->layer_size(); ++i) {
    LayerParameter* layer = net->mutable_layer(i);
    if (layer->name() != target) continue;
    layer->mutable_retrain_weight_quant_param()->CopyFrom(rounding.retrain_weight_quant_param());
    Change<Dtype, RoundedWeightsLayer>(kRounded, layer);
    return;
  }
  LOG(FATAL) << where << "object_layer: \"" << target << "\" is no layer with weights that can be quantized";
}

// Whether it is a layer with weights, and each of its bottoms comes from the Quant layer of its index.
bool IsOnRoundedData(const LayerParameter& layer, const std::map<int, QuantParameter>& inputs) {
  const std::string& type = layer.type();
  const bool has_weights =
      type == "Convolution" || type == "DepthwiseConv" || type == "Deconvolution" || type == "InnerProduct";
  return has_weights && !inputs.empty() && inputs.rbegin()->first + 1 == layer.bottom_size() &&
         static_cast<int>(inputs.size()) == layer.bottom_size();
}

}  // namespace

void MakePlain(LayerParameter* layer) {
  const char* const suffixes[] = {kOnIntegers, kOnRounded, kRounded, kRefreshed};
  for (int i = 0; i < 4; ++i) {
    if (!EndsWith(layer->type(), suffixes[i])) continue;
    layer->set_type(layer->type().substr(0, layer->type().size() - std::string(suffixes[i]).size()));
    if (suffixes[i] == kRounded) layer->clear_retrain_weight_quant_param();
  }
  layer->clear_integer_param();
}

template <typename Dtype>
void PrepareNet(NetParameter* net) {
  std::map<std::string, bool> on_integers;
  Inputs inputs;
  for (int i = 0; i < net->layer_size(); ++i) {
    if (net->layer(i).type() == "DeQuant") on_integers[net->layer(i).dequant_param().object_layer()] = true;
  }
  for (int i = 0; i < net->layer_size(); ++i) {
    if (net->layer(i).type() != "Quant") continue;
    QuantParameter* options = net->mutable_layer(i)->mutable_quant_param();
    options->set_integers(on_integers.count(options->object_layer()) > 0);
    inputs[options->object_layer()][options->index()].CopyFrom(*options);
  }
  for (int i = 0; i < net->layer_size(); ++i) {
    LayerParameter* layer = net->mutable_layer(i);
    if (on_integers.count(layer->name())) {
      SetInputs(inputs[layer->name()], layer);
      Change<Dtype, IntegerLayer>(kOnIntegers, layer);
    } else if (layer->lstm_quant_param().scale_w_size() > 0) {
      SetInputs(inputs[layer->name()], layer);
    } else if (IsOnRoundedData(*layer, inputs[layer->name()])) {
      SetInputs(inputs[layer->name()], layer);
      Change<Dtype, RoundedDataLayer>(kOnRounded, layer);
    } else if (layer->type() == "RetrainWeightQuant") {
      SetRounding<Dtype>(*layer, net);
    } else if (layer->type() == "BatchNorm" && layer->batch_norm_param().has_update_iterations()) {
      Change<Dtype, RefreshedBatchNormLayer>(kRefreshed, layer);
    }
  }
}

template void PrepareNet<float>(NetParameter* net);
template void PrepareNet<double>(NetParameter* net);

namespace {

// The matrices and biases of a recurrent layer of a deploy model become real numbers.
template <typename Dtype>
void LoadRecurrent(Layer<Dtype>* layer, const LayerParameter& source) {
  const LayerParameter& param = layer->layer_param();
  const LSTMQuantParameter& options = param.lstm_quant_param();
  const std::string where = "layer \"" + param.name() + "\" (" + param.type() + "): ";
  CHECK_EQ(source.blobs_size(), layer->blobs().size()) << where << "the caffemodel has another number of blobs";
  CHECK_GT(param.integer_param().input_size(), 0) << where << "in a deploy model its bottoms come from Quant layers";
  const double hidden = static_cast<float>(1.0 / ((1 << (options.num_bits_d() - 1)) - 1));
  int matrix = 0;
  double scale = 0;
  for (int i = 0; i < source.blobs_size(); ++i) {
    Blob<Dtype>* blob = layer->blobs()[i].get();
    const BlobProto& stored = source.blobs(i);
    const bool is_matrix = blob->num_axes() == 2;
    if (is_matrix) {
      CHECK_LT(matrix, options.scale_w_size()) << where << "lstm_quant_param has too few scale_w";
      scale = options.scale_w(matrix++);
    }
    const int count = is_matrix ? stored.int8_data().size() : stored.int32_data_size();
    CHECK_EQ(count, blob->count()) << where << "the caffemodel has " << count << " integers for a blob of shape "
                                   << blob->shape_string();
    // A bias has the step of the sums of the matrix before it: its scale times that of the data or the hidden state.
    const double step = is_matrix ? scale : scale * (i == 1 ? param.integer_param().input(0).scale() : hidden);
    Dtype* values = blob->mutable_cpu_data();
    for (int j = 0; j < count; ++j) {
      const double integer = is_matrix ? static_cast<signed char>(stored.int8_data()[j]) : stored.int32_data(j);
      values[j] = static_cast<float>(integer * step);
    }
  }
}

}  // namespace

template <typename Dtype>
bool LoadLayer(Layer<Dtype>* layer, const LayerParameter& source) {
  if (IntegerLayer<Dtype>* integer = dynamic_cast<IntegerLayer<Dtype>*>(layer)) {
    integer->Load(source);
  } else if (layer->layer_param().lstm_quant_param().scale_w_size() > 0) {
    LoadRecurrent(layer, source);
  } else {
    return false;
  }
  return true;
}

template bool LoadLayer<float>(Layer<float>* layer, const LayerParameter& source);
template bool LoadLayer<double>(Layer<double>* layer, const LayerParameter& source);

}  // namespace amct
}  // namespace caffe
