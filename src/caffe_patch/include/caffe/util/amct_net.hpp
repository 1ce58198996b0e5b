// What the layers of a quantized net must know of each other. The class Net calls the two functions below.
#ifndef CAFFE_UTIL_AMCT_NET_HPP_
#define CAFFE_UTIL_AMCT_NET_HPP_

#include "caffe/layer.hpp"
#include "caffe/proto/caffe.pb.h"

namespace caffe {
namespace amct {

// Before the layers of a net are made: a layer that others have an effect on gets a type that knows of it, and what it
// must know. "T" is the type in the file:
//   a layer that a DeQuant names (deploy models)        "T on integers"; the Quant layers in front of it give integers
//   a layer with weights that other Quants name         "T on rounded data"
//   a layer that a RetrainWeightQuant names             "T with rounded weights"
//   a BatchNorm with update_iterations                  "BatchNorm with refreshed statistics"
// Layers without weights of a deploy model keep their type: the Quant layers in front of them give real numbers on the
// grid of the integers, and AntiQuant passes on. All of these give the numbers that they would give on integers.
template <typename Dtype>
void PrepareNet(NetParameter* net);

// A layer as it is in the file again.
void MakePlain(LayerParameter* layer);

// Load integers into a layer of a deploy model; false if it is another layer, which is left as it is.
template <typename Dtype>
bool LoadLayer(Layer<Dtype>* layer, const LayerParameter& source);

}  // namespace amct
}  // namespace caffe

#endif  // CAFFE_UTIL_AMCT_NET_HPP_
