#include "caffe/util/amct_weights.hpp"

#include <string>
#include <vector>

namespace caffe {
namespace amct {

WeightRows::WeightRows(const std::string& type, const LayerParameter& options, const std::vector<int>& shape)
    : inputs_(0), group_count_(1), inner_(1), has_channel_scales_(true) {
  int count = 1;
  for (size_t i = 0; i < shape.size(); ++i) count *= shape[i];
  row_count_ = shape.empty() ? 1 : shape[0];
  if (type == "Deconvolution") {
    group_count_ = options.convolution_param().group();
    inputs_ = shape[0] / group_count_;
    row_count_ = shape[1] * group_count_;
    for (size_t i = 2; i < shape.size(); ++i) inner_ *= shape[i];
  } else if (type == "InnerProduct") {
    has_channel_scales_ = options.inner_product_param().axis() == 1;
    if (options.inner_product_param().transpose()) {
      inputs_ = shape[0];
      row_count_ = shape[1];
    }
  }
  row_size_ = row_count_ == 0 ? 0 : count / row_count_;
}

int WeightRows::PlaceOf(int i) const {
  if (inputs_ == 0) return i;
  const int output = i / row_size_, input = i % row_size_ / inner_, inside = i % inner_;
  const int outputs = row_count_ / group_count_, group = output / outputs;
  return ((group * inputs_ + input) * outputs + output % outputs) * inner_ + inside;
}

}  // namespace amct
}  // namespace caffe
