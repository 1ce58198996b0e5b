#include "caffe/layers/refreshed_batch_norm_layer.hpp"

#include <sys/stat.h>

#include <cctype>
#include <cstdio>
#include <string>
#include <vector>

#include "caffe/util/amct_net.hpp"
#include "caffe/util/io.hpp"

namespace caffe {

namespace {

// A name as a file name: what is no letter, digit or one of _.-~ is written as % and two digits.
string FileName(const string& name) {
  string made;
  for (size_t i = 0; i < name.size(); ++i) {
    const unsigned char each = name[i];
    char code[4];
    snprintf(code, sizeof(code), "%%%02X", each);
    const bool is_plain = each < 128 && (isalnum(each) || string("_.-~").find(name[i]) != string::npos);
    made += is_plain ? string(1, name[i]) : string(code);
  }
  return made;
}

}  // namespace

template <typename Dtype>
void RefreshedBatchNormLayer<Dtype>::LayerSetUp(const vector<Blob<Dtype>*>& bottom,
                                                const vector<Blob<Dtype>*>& top) {
  BatchNormLayer<Dtype>::LayerSetUp(bottom, top);
  this->use_global_stats_ = false;
}

template <typename Dtype>
void RefreshedBatchNormLayer<Dtype>::Forward_cpu(const vector<Blob<Dtype>*>& bottom,
                                                 const vector<Blob<Dtype>*>& top) {
  const int needed = this->layer_param_.batch_norm_param().update_iterations();
  BatchNormLayer<Dtype>::Forward_cpu(bottom, top);
  if (done_ >= needed) return;
  ++done_;
  LOG(INFO) << "layer " << this->layer_param_.name() << ": statistics refreshed by " << done_ << "/" << needed
            << " batches";
  if (done_ < needed) return;
  Dump();
  this->use_global_stats_ = true;
}

template <typename Dtype>
void RefreshedBatchNormLayer<Dtype>::ToProto(LayerParameter* param, bool write_diff) {
  BatchNormLayer<Dtype>::ToProto(param, write_diff);
  amct::MakePlain(param);
}

template <typename Dtype>
void RefreshedBatchNormLayer<Dtype>::Dump() {
  NetParameter net;
  LayerParameter* layer = net.add_layer();
  layer->set_name(this->layer_param_.name());
  layer->set_type("BatchNorm");
  for (size_t i = 0; i < this->blobs_.size(); ++i) this->blobs_[i]->ToProto(layer->add_blobs());
  const string folder = this->layer_param_.batch_norm_param().dump_dir() + "/";
  for (size_t end = folder.find('/', 1); end != string::npos; end = folder.find('/', end + 1)) {
    mkdir(folder.substr(0, end).c_str(), 0777);  // if it is there already or cannot be made: the file will tell
  }
  const string path = folder + FileName(layer->name()) + ".caffemodel";
  WriteProtoToBinaryFile(net, path + ".new");
  CHECK_EQ(std::rename((path + ".new").c_str(), path.c_str()), 0) << path << ": cannot be written";
}

INSTANTIATE_CLASS(RefreshedBatchNormLayer);

}  // namespace caffe
