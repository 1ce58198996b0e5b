// The part of a quantized recurrent layer that is not in the layer which it is made of.
#ifndef CAFFE_UTIL_AMCT_RECURRENT_HPP_
#define CAFFE_UTIL_AMCT_RECURRENT_HPP_

#include <string>

#include "caffe/proto/caffe.pb.h"

namespace caffe {
namespace amct {

// Add a layer to the unrolled net that rounds a hidden state before it is multiplied; returns the rounded blob. States
// lie in -1..1: the largest integer stands for 1.
inline std::string RoundHidden(const LayerParameter& layer, const std::string& hidden, NetParameter* net) {
  const int bits = layer.lstm_quant_param().num_bits_d();
  const std::string rounded = hidden + "_rounded";
  LayerParameter* rounding = net->add_layer();
  rounding->set_name(rounded);
  rounding->set_type("Quant");
  rounding->mutable_quant_param()->set_scale(1.0 / ((1 << (bits - 1)) - 1));
  rounding->mutable_quant_param()->set_num_bits_d(bits);
  rounding->add_bottom(hidden);
  rounding->add_top(rounded);
  return rounded;
}

}  // namespace amct
}  // namespace caffe

#endif  // CAFFE_UTIL_AMCT_RECURRENT_HPP_
