#include "caffe/util/amct_retraining.hpp"

#include <boost/weak_ptr.hpp>
#include <algorithm>
#include <map>
#include <string>

#include "caffe/common.hpp"
#include "caffe/util/amct_record.hpp"

namespace caffe {
namespace amct {

boost::shared_ptr<Retraining> Retraining::Join(const std::string& record, Rounding* layer) {
  static std::map<std::string, boost::weak_ptr<Retraining> >* const known =
      new std::map<std::string, boost::weak_ptr<Retraining> >();
  if (record.empty()) return boost::shared_ptr<Retraining>();
  boost::shared_ptr<Retraining> found = (*known)[record].lock();
  for (size_t i = 0; found && i < found->layers_.size(); ++i) {
    if (found->layers_[i]->rounding_name() == layer->rounding_name()) found.reset();  // of another net
  }
  if (!found || found->is_running_) {
    found.reset(new Retraining(record));
    (*known)[record] = found;
  }
  found->layers_.push_back(layer);
  return found;
}

void Retraining::Leave(Rounding* layer) {
  layers_.erase(std::remove(layers_.begin(), layers_.end(), layer), layers_.end());
}

void Retraining::Report(Rounding* layer) {
  is_running_ = true;
  if (layers_.back() != layer) return;
  ScaleOffsetRecord record;
  for (size_t i = 0; i < layers_.size(); ++i) {
    SingleLayerRecord* entry = EntryOf(layers_[i]->object_layer(), &record);
    entry->set_object_layer(layers_[i]->object_layer());
    layers_[i]->AddFactors(entry);
  }
  const std::string now = record.SerializeAsString();
  if (now == written_) return;
  ReadRecord(record_);  // it must be one
  WriteRecord(record_, record);
  written_ = now;
  LOG(INFO) << "wrote the factors of " << record.record_size() << " retrained layers to " << record_;
}

}  // namespace amct
}  // namespace caffe
