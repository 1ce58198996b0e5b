#include "caffe/layers/passing_layer.hpp"

namespace caffe {

INSTANTIATE_CLASS(AntiQuantLayer);
REGISTER_LAYER_CLASS(AntiQuant);
INSTANTIATE_CLASS(SearchNLayer);
REGISTER_LAYER_CLASS(SearchN);

}  // namespace caffe
