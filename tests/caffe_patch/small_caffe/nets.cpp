// Nets of these layers for ctypes. A function that fails returns 1 or null; last_error() tells why.
#include <cmath>
#include <map>
#include <string>
#include <vector>

#include "caffe/layer_factory.hpp"
#include "caffe/util/amct_net.hpp"

using namespace caffe;  // NOLINT

namespace {

string error, text;

template <typename Message>
void ParseAll(const char* given, Message* message) {
  small::Words words(given);
  message->Parse(&words);
  if (!words.AtEnd()) throw std::runtime_error("a text that goes on: " + words.Peek());
}

struct AnyNet {
  virtual ~AnyNet() {}
  virtual void Load(const NetParameter& weights) = 0;
  virtual void Share(AnyNet* other) = 0;
  virtual void Run(bool backward) = 0;
  virtual NetParameter Saved() = 0;
  // The numbers of a blob, or of a parameter of a layer (index 0 and on); kind 0: data, 1: gradient.
  virtual int Access(const string& name, int index, int kind, bool writes, double* values) = 0;
  virtual void Reshape(const string& name, const vector<int>& shape) = 0;
};

template <typename Dtype>
class SmallNet : public AnyNet {
 public:
  SmallNet(NetParameter net, Phase phase) {
    for (int i = 0; i < net.layer_size(); ++i) net.mutable_layer(i)->set_phase(phase);
    amct::PrepareNet<Dtype>(&net);
    for (int i = 0; i < net.layer_size(); ++i) Add(net.layer(i));
  }
  void Load(const NetParameter& weights) {
    for (int i = 0; i < weights.layer_size(); ++i) {
      for (auto& layer : layers_) {
        if (layer->layer_param().name() != weights.layer(i).name() || amct::LoadLayer(layer.get(), weights.layer(i))) {
          continue;
        }
        for (size_t j = 0; j < layer->blobs().size(); ++j) {
          const auto& stored = weights.layer(i).blobs(j).data();
          CHECK_EQ(stored.size(), layer->blobs()[j]->count()) << "another count of weights";
          std::copy(stored.begin(), stored.end(), layer->blobs()[j]->mutable_cpu_data());
        }
      }
    }
  }
  void Share(AnyNet* other) {
    auto& own = layers_;
    auto& theirs = static_cast<SmallNet*>(other)->layers_;
    for (size_t i = 0; i < own.size(); ++i) {
      for (size_t j = 0; j < own[i]->blobs().size(); ++j) own[i]->blobs()[j]->ShareData(*theirs[i]->blobs()[j]);
    }
  }
  void Run(bool backward) {
    for (size_t i = 0; i < layers_.size() && !backward; ++i) layers_[i]->Forward(bottoms_[i], tops_[i]);
    for (size_t i = layers_.size(); i > 0 && backward; --i) {
      for (auto& blob : layers_[i - 1]->blobs()) {
        if (!shared_.count(blob.get())) std::fill_n(blob->mutable_cpu_diff(), blob->count(), Dtype(0));
      }
    }
    for (size_t i = layers_.size(); i > 0 && backward; --i) {
      if (tops_[i - 1].empty()) continue;
      layers_[i - 1]->Backward(tops_[i - 1], vector<bool>(bottoms_[i - 1].size(), true), bottoms_[i - 1]);
    }
  }
  NetParameter Saved() {
    NetParameter saved;
    for (auto& layer : layers_) layer->ToProto(saved.add_layer());
    return saved;
  }
  int Access(const string& name, int index, int kind, bool writes, double* values) {
    Blob<Dtype>* blob = index < 0 ? blobs_.at(name).get() : NULL;
    for (auto& layer : layers_) {
      if (index >= 0 && layer->layer_param().name() == name) blob = layer->blobs().at(index).get();
    }
    Dtype* place = kind ? blob->mutable_cpu_diff() : blob->mutable_cpu_data();
    for (int i = 0; values != NULL && i < blob->count(); ++i) {
      if (writes) {
        place[i] = values[i];
      } else {
        values[i] = place[i];
      }
    }
    return blob->count();
  }
  void Reshape(const string& name, const vector<int>& shape) { blobs_.at(name)->Reshape(shape); }

 private:
  void Add(const LayerParameter& param) {
    vector<Blob<Dtype>*> bottom, top;
    for (const string& name : param.bottom()) bottom.push_back(blobs_.at(name).get());
    for (const string& name : param.top()) {
      blobs_[name].reset(new Blob<Dtype>());
      top.push_back(blobs_[name].get());
    }
    layers_.push_back(LayerRegistry<Dtype>::CreateLayer(param));
    Layer<Dtype>& layer = *layers_.back();
    layer.SetUp(bottom, top);
    for (size_t i = 0; i < layer.blobs().size(); ++i) {
      const bool given = static_cast<int>(i) < layer.layer_param().param_size();
      layer.set_param_propagate_down(i, !given || layer.layer_param().param(i).lr_mult() != 0);
      const string name = given ? layer.layer_param().param(i).name() : "";
      if (name.empty()) continue;
      if (owners_.count(name)) {
        layer.blobs()[i]->ShareData(*owners_[name]);
        layer.blobs()[i]->ShareDiff(*owners_[name]);
        shared_[layer.blobs()[i].get()] = true;
      } else {
        owners_[name] = layer.blobs()[i];
      }
    }
    bottoms_.push_back(bottom);
    tops_.push_back(top);
  }

  std::map<string, shared_ptr<Blob<Dtype> > > blobs_, owners_;
  std::map<Blob<Dtype>*, bool> shared_;
  vector<shared_ptr<Layer<Dtype> > > layers_;
  vector<vector<Blob<Dtype>*> > bottoms_, tops_;
};

template <typename Action>
int Try(const Action& action) {
  try {
    action();
    return 0;
  } catch (const std::exception& failure) {
    error = failure.what();
    return 1;
  }
}

}  // namespace

extern "C" {

const char* last_error() { return error.c_str(); }

const char* take_log() {
  text.clear();
  for (const string& line : Log()) text += line + "\n";
  Log().clear();
  return text.c_str();
}

AnyNet* net_new(const char* prototxt, int phase, int is_double) {
  AnyNet* net = NULL;
  Try([&] {
    NetParameter parsed;
    ParseAll(prototxt, &parsed);
    if (is_double) {
      net = new SmallNet<double>(parsed, phase ? TEST : TRAIN);
    } else {
      net = new SmallNet<float>(parsed, phase ? TEST : TRAIN);
    }
  });
  return net;
}

void net_free(AnyNet* net) { delete net; }

int net_load(AnyNet* net, const char* weights) {
  return Try([&] {
    NetParameter parsed;
    ParseAll(weights, &parsed);
    net->Load(parsed);
  });
}

int net_share(AnyNet* net, AnyNet* other) {
  return Try([&] { net->Share(other); });
}

int net_run(AnyNet* net, int backward) {
  return Try([&] { net->Run(backward); });
}

int net_reshape(AnyNet* net, const char* blob, const int* shape, int axes) {
  return Try([&] { net->Reshape(blob, vector<int>(shape, shape + axes)); });
}

int net_access(AnyNet* net, const char* name, int index, int kind, int writes, double* values) {
  int count = -1;
  Try([&] { count = net->Access(name, index, kind, writes, values); });
  return count;
}

const char* net_saved(AnyNet* net) {
  Try([&] { text = net->Saved().DebugString(); });
  return text.c_str();
}

}  // extern "C"
