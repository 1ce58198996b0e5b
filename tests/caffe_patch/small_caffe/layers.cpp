// Layers of a plain Caffe, written as loops.
#include <algorithm>
#include <vector>

#include "caffe/layers/batch_norm_layer.hpp"
#include "caffe/layer_factory.hpp"

namespace caffe {

REGISTER_LAYER_CLASS(BatchNorm);

template <typename Dtype>
class InputLayer : public Layer<Dtype> {
 public:
  typedef vector<Blob<Dtype>*> Blobs;
  explicit InputLayer(const LayerParameter& param) : Layer<Dtype>(param) {}
  virtual void LayerSetUp(const Blobs&, const Blobs& top) {
    for (size_t i = 0; i < top.size(); ++i) {
      const auto& dims = this->layer_param_.input_param().shape(i).dim();
      top[i]->Reshape(vector<int>(dims.begin(), dims.end()));
    }
  }
  virtual void Reshape(const Blobs&, const Blobs&) {}

 protected:
  virtual void Forward_cpu(const Blobs&, const Blobs&) {}
  virtual void Backward_cpu(const Blobs&, const vector<bool>&, const Blobs&) {}
};
REGISTER_LAYER_CLASS(Input);

template <typename Dtype>
class ReLULayer : public Layer<Dtype> {
 public:
  typedef vector<Blob<Dtype>*> Blobs;
  explicit ReLULayer(const LayerParameter& param) : Layer<Dtype>(param) {}
  virtual void Reshape(const Blobs& bottom, const Blobs& top) { top[0]->ReshapeLike(*bottom[0]); }

 protected:
  virtual void Forward_cpu(const Blobs& bottom, const Blobs& top) {
    for (int i = 0; i < top[0]->count(); ++i) {
      top[0]->mutable_cpu_data()[i] = std::max(bottom[0]->cpu_data()[i], Dtype(0));
    }
  }
  virtual void Backward_cpu(const Blobs& top, const vector<bool>&, const Blobs& bottom) {
    for (int i = 0; i < top[0]->count(); ++i) {
      bottom[0]->mutable_cpu_diff()[i] = bottom[0]->cpu_data()[i] > 0 ? top[0]->cpu_diff()[i] : Dtype(0);
    }
  }
};
REGISTER_LAYER_CLASS(ReLU);

// What all layers with weights do, written once.
template <typename Dtype>
class WeightedLayer : public Layer<Dtype> {
 public:
  typedef vector<Blob<Dtype>*> Blobs;
  explicit WeightedLayer(const LayerParameter& param) : Layer<Dtype>(param) {}
  virtual const char* type() const { return this->layer_param_.type().c_str(); }

 protected:
  void Make(const vector<int>& shape, int outputs, bool has_bias) {
    this->blobs_.emplace_back(new Blob<Dtype>(shape));
    if (has_bias) this->blobs_.emplace_back(new Blob<Dtype>(vector<int>(1, outputs)));
  }
  // For each product three places: of the top that it is added to, of the bottom, of the weight.
  virtual void EachProduct(const Blobs& bottom, const Blobs& top, vector<int>* places) const = 0;

  virtual void Forward_cpu(const Blobs& bottom, const Blobs& top) {
    vector<int> places;
    for (size_t i = 0; i < bottom.size(); ++i) {
      EachProduct(Blobs(1, bottom[i]), Blobs(1, top[i]), &places);
      Dtype* out = top[i]->mutable_cpu_data();
      const int inner = top[i]->num_axes() > 2 ? top[i]->count(2) : 1, outputs = top[i]->shape(1);
      for (int j = 0; j < top[i]->count(); ++j) {
        out[j] = this->blobs_.size() > 1 ? this->blobs_[1]->cpu_data()[j / inner % outputs] : Dtype(0);
      }
      for (size_t j = 0; j < places.size(); j += 3) {
        out[places[j]] += bottom[i]->cpu_data()[places[j + 1]] * this->blobs_[0]->cpu_data()[places[j + 2]];
      }
    }
  }
  virtual void Backward_cpu(const Blobs& top, const vector<bool>& propagate_down, const Blobs& bottom) {
    vector<int> places;
    EachProduct(bottom, top, &places);
    const Dtype* given = top[0]->cpu_diff();
    const int inner = top[0]->num_axes() > 2 ? top[0]->count(2) : 1, outputs = top[0]->shape(1);
    if (propagate_down[0]) std::fill_n(bottom[0]->mutable_cpu_diff(), bottom[0]->count(), Dtype(0));
    for (size_t j = 0; j < places.size(); j += 3) {
      const Dtype upstream = given[places[j]];
      if (this->param_propagate_down(0)) {
        this->blobs_[0]->mutable_cpu_diff()[places[j + 2]] += upstream * bottom[0]->cpu_data()[places[j + 1]];
      }
      if (propagate_down[0]) {
        bottom[0]->mutable_cpu_diff()[places[j + 1]] += upstream * this->blobs_[0]->cpu_data()[places[j + 2]];
      }
    }
    for (int j = 0; this->param_propagate_down(1) && j < top[0]->count(); ++j) {
      this->blobs_[1]->mutable_cpu_diff()[j / inner % outputs] += given[j];
    }
  }
};

template <typename Dtype>
class InnerProductLayer : public WeightedLayer<Dtype> {
 public:
  typedef vector<Blob<Dtype>*> Blobs;
  explicit InnerProductLayer(const LayerParameter& param) : WeightedLayer<Dtype>(param) {}
  virtual void LayerSetUp(const Blobs& bottom, const Blobs&) {
    const auto& options = this->layer_param_.inner_product_param();
    const int outputs = options.num_output(), inputs = bottom[0]->count(1);
    const vector<int> shape = options.transpose() ? vector<int>{inputs, outputs} : vector<int>{outputs, inputs};
    this->Make(shape, outputs, options.bias_term());
  }
  virtual void Reshape(const Blobs& bottom, const Blobs& top) {
    top[0]->Reshape({bottom[0]->shape(0), static_cast<int>(this->layer_param_.inner_product_param().num_output())});
  }

 protected:
  virtual void EachProduct(const Blobs& bottom, const Blobs& top, vector<int>* places) const {
    const bool transposed = this->layer_param_.inner_product_param().transpose();
    const int outputs = top[0]->shape(1), inputs = bottom[0]->count(1);
    places->clear();
    for (int n = 0; n < top[0]->shape(0); ++n) {
      for (int o = 0; o < outputs; ++o) {
        for (int i = 0; i < inputs; ++i) {
          const int weight = transposed ? i * outputs + o : o * inputs + i;
          places->insert(places->end(), {n * outputs + o, n * inputs + i, weight});
        }
      }
    }
  }
};
REGISTER_LAYER_CLASS(InnerProduct);

// Square kernels; a deconvolution is a convolution whose top and bottom have changed places.
template <typename Dtype>
class AnyConvolutionLayer : public WeightedLayer<Dtype> {
 public:
  typedef vector<Blob<Dtype>*> Blobs;
  AnyConvolutionLayer(const LayerParameter& param, bool transposed)
      : WeightedLayer<Dtype>(param), transposed_(transposed), options_(param.convolution_param()) {
    kernel_ = options_.kernel_size(0);
    pad_ = options_.pad_size() ? options_.pad(0) : 0;
    stride_ = options_.stride_size() ? options_.stride(0) : 1;
    groups_ = options_.group();
  }
  virtual void LayerSetUp(const Blobs& bottom, const Blobs&) {
    const int outputs = options_.num_output(), inputs = bottom[0]->shape(1);
    const int first = transposed_ ? inputs : outputs, second = (transposed_ ? outputs : inputs) / groups_;
    this->Make({first, second, kernel_, kernel_}, outputs, options_.bias_term());
  }
  virtual void Reshape(const Blobs& bottom, const Blobs& top) {
    for (size_t i = 0; i < bottom.size(); ++i) {
      vector<int> shape = bottom[i]->shape();
      shape[1] = options_.num_output();
      for (int axis : {2, 3}) {
        shape[axis] = transposed_ ? stride_ * (shape[axis] - 1) + kernel_ - 2 * pad_
                                  : (shape[axis] + 2 * pad_ - kernel_) / stride_ + 1;
      }
      top[i]->Reshape(shape);
    }
  }

 protected:
  virtual void EachProduct(const Blobs& bottom, const Blobs& top, vector<int>* places) const {
    const Blob<Dtype>& small = transposed_ ? *bottom[0] : *top[0];
    const Blob<Dtype>& large = transposed_ ? *top[0] : *bottom[0];
    const int small_group = small.shape(1) / groups_, large_group = large.shape(1) / groups_;
    places->clear();
    for (int i = 0; i < small.count(); ++i) {
      const int width = small.shape(3), height = small.shape(2), channel = i / (width * height) % small.shape(1);
      const int sample = i / small.count(1), group = channel / small_group;
      for (int c = 0; c < large_group; ++c) {
        for (int k = 0; k < kernel_ * kernel_; ++k) {
          const int y = i / width % height * stride_ + k / kernel_ - pad_, x = i % width * stride_ + k % kernel_ - pad_;
          if (y < 0 || x < 0 || y >= large.shape(2) || x >= large.shape(3)) continue;
          const int other =
              ((sample * large.shape(1) + group * large_group + c) * large.shape(2) + y) * large.shape(3) + x;
          const int weight = (channel * large_group + c) * kernel_ * kernel_ + k;
          places->insert(places->end(), {transposed_ ? other : i, transposed_ ? i : other, weight});
        }
      }
    }
  }

 private:
  const bool transposed_;
  const ConvolutionParameter options_;
  int kernel_, pad_, stride_, groups_;
};

template <typename Dtype>
class ConvolutionLayer : public AnyConvolutionLayer<Dtype> {
 public:
  explicit ConvolutionLayer(const LayerParameter& param) : AnyConvolutionLayer<Dtype>(param, false) {}
};
REGISTER_LAYER_CLASS(Convolution);

template <typename Dtype>
class DeconvolutionLayer : public AnyConvolutionLayer<Dtype> {
 public:
  explicit DeconvolutionLayer(const LayerParameter& param) : AnyConvolutionLayer<Dtype>(param, true) {}
};
REGISTER_LAYER_CLASS(Deconvolution);

// The blobs of the layer that is made of a user's LSTM; it computes nothing.
template <typename Dtype>
class LSTMQuantLayer : public Layer<Dtype> {
 public:
  typedef vector<Blob<Dtype>*> Blobs;
  explicit LSTMQuantLayer(const LayerParameter& param) : Layer<Dtype>(param) {}
  virtual void LayerSetUp(const Blobs& bottom, const Blobs&) {
    const int size = this->layer_param_.recurrent_param().num_output();
    for (const vector<int>& shape :
         {vector<int>{4 * size, bottom[0]->count(2)}, vector<int>{4 * size}, vector<int>{4 * size, size}}) {
      this->blobs_.emplace_back(new Blob<Dtype>(shape));
    }
  }
  virtual void Reshape(const Blobs& bottom, const Blobs& top) { top[0]->ReshapeLike(*bottom[0]); }

 protected:
  virtual void Forward_cpu(const Blobs&, const Blobs&) {}
  virtual void Backward_cpu(const Blobs&, const vector<bool>&, const Blobs&) {}
};
REGISTER_LAYER_CLASS(LSTMQuant);

}  // namespace caffe
