// Weights as quantization sees them: one row for each output.
#ifndef CAFFE_UTIL_AMCT_WEIGHTS_HPP_
#define CAFFE_UTIL_AMCT_WEIGHTS_HPP_

#include <string>
#include <vector>

#include "caffe/proto/caffe.pb.h"

namespace caffe {
namespace amct {

// How a layer stores its weight. Convolution, and any layer that is not known here, has the outputs in front; a
// Deconvolution has them behind the inputs of each group, an InnerProduct with transpose behind all inputs.
class WeightRows {
 public:
  // The plain type of the layer, its options and the shape of its weight.
  WeightRows(const std::string& type, const LayerParameter& options, const std::vector<int>& shape);

  int row_count() const { return row_count_; }
  int row_size() const { return row_size_; }
  // Whether each output can have a scale of its own: DeQuant has one for each channel, axis 1.
  bool has_channel_scales() const { return has_channel_scales_; }

  // Into rows, and back into the order of the layer.
  template <typename From, typename To>
  void Gather(const From* weight, To* rows) const {
    for (int i = 0; i < row_count_ * row_size_; ++i) rows[i] = static_cast<To>(weight[PlaceOf(i)]);
  }
  template <typename From, typename To>
  void Scatter(const From* rows, To* weight) const {
    for (int i = 0; i < row_count_ * row_size_; ++i) weight[PlaceOf(i)] = static_cast<To>(rows[i]);
  }

 private:
  // Where the layer keeps a value of the rows.
  int PlaceOf(int i) const;

  int row_count_, row_size_;
  // Rows of blocks of inner_ values; of group_count_ groups with inputs_ inputs each; 0 inputs: as they are.
  int inputs_, group_count_, inner_;
  bool has_channel_scales_;
};

}  // namespace amct
}  // namespace caffe

#endif  // CAFFE_UTIL_AMCT_WEIGHTS_HPP_
