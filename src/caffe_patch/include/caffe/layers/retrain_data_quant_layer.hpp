#ifndef CAFFE_LAYERS_RETRAIN_DATA_QUANT_LAYER_HPP_
#define CAFFE_LAYERS_RETRAIN_DATA_QUANT_LAYER_HPP_

#include <string>
#include <vector>

#include "caffe/blob.hpp"
#include "caffe/layer.hpp"
#include "caffe/proto/caffe.pb.h"
#include "caffe/util/amct_retraining.hpp"
#include "caffe/util/quant.hpp"

namespace caffe {

// ULQ: rounds its bottom between two clips, which are trained.
//
// Its blobs are the upper clip, the lower clip, and the last legal pair of both, since an update may make a clip
// illegal; equal ones are not found yet. In training IFMR finds them in the first batches, which pass unrounded.
template <typename Dtype>
class RetrainDataQuantLayer : public Layer<Dtype>, public amct::Rounding {
 public:
  explicit RetrainDataQuantLayer(const LayerParameter& param)
      : Layer<Dtype>(param), observer_(NULL), batches_(0), is_rounded_(false), low_(0), high_(0) {}
  virtual ~RetrainDataQuantLayer();
  virtual void LayerSetUp(const vector<Blob<Dtype>*>& bottom, const vector<Blob<Dtype>*>& top);
  virtual void Reshape(const vector<Blob<Dtype>*>& bottom, const vector<Blob<Dtype>*>& top);
  virtual inline const char* type() const { return "RetrainDataQuant"; }
  virtual inline int ExactNumBottomBlobs() const { return 1; }
  virtual inline int ExactNumTopBlobs() const { return 1; }

  virtual const std::string& rounding_name() const { return this->layer_param_.name(); }
  virtual const std::string& object_layer() const { return options().object_layer(); }
  virtual void AddFactors(SingleLayerRecord* entry);

 protected:
  virtual void Forward_cpu(const vector<Blob<Dtype>*>& bottom, const vector<Blob<Dtype>*>& top);
  virtual void Backward_cpu(const vector<Blob<Dtype>*>& top, const vector<bool>& propagate_down,
                            const vector<Blob<Dtype>*>& bottom);

 private:
  const RetrainDataQuantParameter& options() const { return this->layer_param_.retrain_data_quant_param(); }
  string Where() const;
  // The clips, found or made legal; false as long as they are not known.
  bool PrepareClips(const Blob<Dtype>& bottom);
  bool FindClips(const Blob<Dtype>& bottom);
  bool SearchClips(const Blob<Dtype>& bottom, float* low, float* high);
  void SetClips(float low, float high);

  quant_ifmr* observer_;
  int batches_;
  boost::shared_ptr<amct::Retraining> retraining_;
  vector<int> shape_;
  // Of the last forward.
  bool is_rounded_;
  float low_, high_;
};

}  // namespace caffe

#endif  // CAFFE_LAYERS_RETRAIN_DATA_QUANT_LAYER_HPP_
