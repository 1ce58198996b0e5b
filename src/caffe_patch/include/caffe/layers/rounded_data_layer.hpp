#ifndef CAFFE_LAYERS_ROUNDED_DATA_LAYER_HPP_
#define CAFFE_LAYERS_ROUNDED_DATA_LAYER_HPP_

#include <vector>

#include "caffe/blob.hpp"
#include "caffe/layer.hpp"
#include "caffe/proto/caffe.pb.h"

namespace caffe {

// A layer with weights of a fake-quant model: its bottoms hold rounded values.
//
// Float arithmetic rounds each product and sum, and a value near the middle of two integers then falls on another side
// than in the deploy model. The integers of data and weights follow from the values; their sums are exact, and become
// real numbers at once, as in the deploy model. Where the weights are on no grid (trained further, or never rounded),
// the net's own layer of the plain type computes, as it does in backward.
template <typename Dtype>
class RoundedDataLayer : public Layer<Dtype> {
 public:
  explicit RoundedDataLayer(const LayerParameter& param) : Layer<Dtype>(param), is_on_grid_(false) {}
  virtual void LayerSetUp(const vector<Blob<Dtype>*>& bottom, const vector<Blob<Dtype>*>& top);
  virtual void Reshape(const vector<Blob<Dtype>*>& bottom, const vector<Blob<Dtype>*>& top);
  virtual inline const char* type() const { return plain_ ? plain_->type() : ""; }
  virtual inline bool AllowForceBackward(const int bottom_index) const {
    return plain_->AllowForceBackward(bottom_index);
  }
  // The plain type.
  virtual void ToProto(LayerParameter* param, bool write_diff = false);

 protected:
  virtual void Forward_cpu(const vector<Blob<Dtype>*>& bottom, const vector<Blob<Dtype>*>& top);
  virtual void Backward_cpu(const vector<Blob<Dtype>*>& top, const vector<bool>& propagate_down,
                            const vector<Blob<Dtype>*>& bottom);

 private:
  // Find the integers of weight and bias, if they are others than in the last forward.
  void FindIntegers();
  // The integers of a bottom; false if it holds NaN or infinity.
  bool FindData(const Blob<Dtype>& bottom, int index);
  void WriteReal(int index, Blob<Dtype>* top) const;

  shared_ptr<Layer<Dtype> > plain_;
  // It adds integers: a double holds all sums of products of 16 and 8 bits.
  shared_ptr<Layer<double> > exact_;
  shared_ptr<Blob<double> > in_, out_;
  // The blobs that the integers were found for, and whether there are any.
  vector<vector<Dtype> > known_;
  bool is_on_grid_;
  vector<int32_t> bias_;
  // By bottom: the step of the sums of each output.
  vector<vector<float> > steps_;
};

}  // namespace caffe

#endif  // CAFFE_LAYERS_ROUNDED_DATA_LAYER_HPP_
