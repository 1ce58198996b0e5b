#ifndef CAFFE_LAYERS_RETRAIN_WEIGHT_QUANT_LAYER_HPP_
#define CAFFE_LAYERS_RETRAIN_WEIGHT_QUANT_LAYER_HPP_

#include <string>
#include <vector>

#include "caffe/blob.hpp"
#include "caffe/layer.hpp"
#include "caffe/proto/caffe.pb.h"
#include "caffe/util/amct_retraining.hpp"

namespace caffe {

// Tells that the weights of another layer are rounded in training. That layer does it itself: see RoundedWeightsLayer.
template <typename Dtype>
class RetrainWeightQuantLayer : public Layer<Dtype> {
 public:
  explicit RetrainWeightQuantLayer(const LayerParameter& param) : Layer<Dtype>(param) {}
  virtual void Reshape(const vector<Blob<Dtype>*>& bottom, const vector<Blob<Dtype>*>& top) {}
  virtual inline const char* type() const { return "RetrainWeightQuant"; }
  virtual inline int ExactNumBottomBlobs() const { return 0; }
  virtual inline int ExactNumTopBlobs() const { return 0; }

 protected:
  virtual void Forward_cpu(const vector<Blob<Dtype>*>& bottom, const vector<Blob<Dtype>*>& top) {}
  virtual void Backward_cpu(const vector<Blob<Dtype>*>& top, const vector<bool>& propagate_down,
                            const vector<Blob<Dtype>*>& bottom) {}
};

// ARQ in training: a layer whose weights are rounded in each forward, with a straight-through gradient.
//
// It is the net's own layer of the plain type, which computes with the rounded weights; its own blobs are the weights
// that are trained.
template <typename Dtype>
class RoundedWeightsLayer : public Layer<Dtype>, public amct::Rounding {
 public:
  explicit RoundedWeightsLayer(const LayerParameter& param) : Layer<Dtype>(param) {}
  virtual ~RoundedWeightsLayer();
  virtual void LayerSetUp(const vector<Blob<Dtype>*>& bottom, const vector<Blob<Dtype>*>& top);
  virtual void Reshape(const vector<Blob<Dtype>*>& bottom, const vector<Blob<Dtype>*>& top);
  virtual inline const char* type() const { return inner_ ? inner_->type() : ""; }
  virtual inline bool AllowForceBackward(const int bottom_index) const {
    return inner_->AllowForceBackward(bottom_index);
  }
  // The plain type and the weights that are trained.
  virtual void ToProto(LayerParameter* param, bool write_diff = false);

  virtual const std::string& rounding_name() const { return this->layer_param_.name(); }
  virtual const std::string& object_layer() const { return this->layer_param_.name(); }
  virtual void AddFactors(SingleLayerRecord* entry);

 protected:
  virtual void Forward_cpu(const vector<Blob<Dtype>*>& bottom, const vector<Blob<Dtype>*>& top);
  virtual void Backward_cpu(const vector<Blob<Dtype>*>& top, const vector<bool>& propagate_down,
                            const vector<Blob<Dtype>*>& bottom);

 private:
  // The rows of the weight; the scales are found for them.
  void FindScales(vector<float>* rows, vector<float>* scales) const;
  void RoundWeight();

  shared_ptr<Layer<Dtype> > inner_;
  boost::shared_ptr<amct::Retraining> retraining_;
};

}  // namespace caffe

#endif  // CAFFE_LAYERS_RETRAIN_WEIGHT_QUANT_LAYER_HPP_
