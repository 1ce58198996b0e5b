#include "caffe/util/amct_calibration.hpp"

#include <boost/weak_ptr.hpp>
#include <algorithm>
#include <cstdio>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "caffe/common.hpp"
#include "caffe/util/amct_floats.hpp"
#include "caffe/util/amct_record.hpp"

namespace caffe {
namespace amct {

namespace {

// As a string of JSON.
std::string Quoted(const std::string& text) {
  std::ostringstream out;
  out << '"';
  for (size_t i = 0; i < text.size(); ++i) {
    const unsigned char each = text[i];
    char code[8];
    if (each < 0x20) {
      snprintf(code, sizeof(code), "\\u%04x", each);
      out << code;
    } else {
      out << (each == '"' || each == '\\' ? "\\" : "") << text[i];
    }
  }
  out << '"';
  return out.str();
}

std::string ProgressFile(const std::string& record) { return record + ".progress.json"; }

}  // namespace

Watched::Watched(const std::string& name, const IFMRParameter& options)
    : name_(name), options_(options), observer_(NULL), batches_(0) {
  const std::string where = "layer \"" + name + "\" (IFMR): ";
  CHECK(options.object_layer_size() > 0 && !options.object_layer(0).empty())
      << where << "ifmr_param needs object_layer, the name of a layer";
  CHECK(!options.record_file_path().empty()) << where << "ifmr_param needs record_file_path";
  CHECK(options.settings().empty())
      << where << "settings: a patched Caffe computes IFMR only; choose ifmr_quantize in the config, or calibrate with "
      << "amct_caffe's own engine: " << options.settings();
  CHECK_GT(options.batch_num(), 0) << where << "batch_num: expected above 0";
  if (!options.factors_from().empty()) return;
  quant_ifmr_settings given;
  given.bits = options.num_bits_d();
  given.with_offset = options.with_offset();
  given.search_start = Decimal(options.search_range_start());
  given.search_end = Decimal(options.search_range_end());
  given.search_step = Decimal(options.search_step());
  given.max_percentile = Decimal(options.max_percentile());
  given.min_percentile = Decimal(options.min_percentile());
  given.batches = options.batch_num();
  observer_ = quant_ifmr_new(&given);
  CHECK(observer_ != NULL) << where << quant_error();
}

std::string Watched::Failure() const {
  return std::string(options_.with_offset() ? "IfmrQuantWithOffset" : "IfmrQuantWithoutOffset") +
         " scale is illegal: layer \"" + options_.object_layer(0) + "\", input " + std::to_string(options_.index()) +
         ": " + quant_error();
}

void Watched::Observe(const float* values, size_t count, const std::vector<int>& shape) {
  shape_ = shape;
  ++batches_;
  if (observer_ == NULL) return;
  CHECK_EQ(quant_ifmr_observe(observer_, values, count), 0) << Failure();
}

void Watched::Find(quant_ifmr_result* result) const {
  CHECK_EQ(quant_ifmr_find(observer_, result), 0) << Failure();
  LOG_IF(WARNING, result->near_zero) << "layer \"" << options_.object_layer(0) << "\", input " << options_.index()
                                     << ": its values are practically zero; it gets scale 1";
}

boost::shared_ptr<Calibration> Calibration::Join(const boost::shared_ptr<Watched>& layer) {
  static std::map<std::string, boost::weak_ptr<Calibration> >* const known =
      new std::map<std::string, boost::weak_ptr<Calibration> >();
  const std::string& record = layer->options().record_file_path();
  boost::shared_ptr<Calibration> found = (*known)[record].lock();
  for (size_t i = 0; found && i < found->layers_.size(); ++i) {
    if (found->layers_[i]->name() == layer->name()) found.reset();  // of another net
  }
  if (!found || found->is_running_) {
    found.reset(new Calibration(record));
    (*known)[record] = found;
  }
  found->layers_.push_back(layer);
  return found;
}

Watched* Calibration::LeaderOf(Watched* layer) const {
  const std::string& leader = layer->options().factors_from();
  if (leader.empty()) return layer;
  for (size_t i = 0; i < layers_.size(); ++i) {
    if (layers_[i]->name() == leader && layers_[i]->observer_ != NULL) return layers_[i].get();
  }
  LOG(FATAL) << "layer \"" << layer->name() << "\" (IFMR): factors_from: \"" << leader
             << "\" is no IFMR layer that watches its bottom";
  return NULL;
}

void Calibration::Begin() {
  is_running_ = true;
  for (size_t i = 0; i < layers_.size(); ++i) LeaderOf(layers_[i].get());
  ReadRecord(record_);  // it must be there before a long calibration
}

void Calibration::Observe(Watched* layer, const float* values, size_t count, const std::vector<int>& shape) {
  if (!is_running_) Begin();
  if (layer->is_complete()) {
    if (written_ < layers_.size()) Write();  // layers that are still missing may never be run
    return;
  }
  layer->Observe(values, count, shape);
  size_t complete = 0;
  for (size_t i = 0; i < layers_.size(); ++i) complete += layers_[i]->is_complete();
  if (complete == layers_.size()) {
    Write();
    std::remove(ProgressFile(record_).c_str());
  } else if (layer->options().reports_progress()) {
    LOG(INFO) << "calibration: " << layer->batches_ << "/" << layer->options().batch_num() << " batches";
    NoteProgress();
  }
}

void Calibration::NoteProgress() const {
  std::ostringstream text;
  std::map<std::string, std::pair<int, int> > layers;
  for (size_t i = 0; i < layers_.size(); ++i) {
    const Watched& each = *layers_[i];
    for (int j = 0; j < each.options().object_layer_size(); ++j) {
      layers[each.options().object_layer(j)] = std::make_pair(each.batches_, each.options().batch_num());
    }
  }
  text << "{\"version\": 1, \"layers\": {";
  for (std::map<std::string, std::pair<int, int> >::const_iterator i = layers.begin(); i != layers.end(); ++i) {
    text << (i == layers.begin() ? "" : ", ") << Quoted(i->first) << ": [" << i->second.first << ", "
         << i->second.second << "]";
  }
  text << "}}\n";
  WriteText(ProgressFile(record_), text.str());
}

void Calibration::Write() {
  std::map<const Watched*, quant_ifmr_result> found;
  std::vector<std::pair<std::string, ActivationQuantParam> > factors;
  size_t ready = 0;
  for (size_t i = 0; i < layers_.size(); ++i) {
    const Watched* layer = layers_[i].get();
    const Watched* leader = LeaderOf(layers_[i].get());
    if (!layer->is_complete() || !leader->is_complete()) continue;
    ++ready;
    if (found.count(leader) == 0) leader->Find(&found[leader]);
    const quant_ifmr_result& result = found[leader];
    for (int j = 0; j < layer->options().object_layer_size(); ++j) {
      factors.push_back(std::make_pair(layer->options().object_layer(j),
                                       InputFactors(result.scale, result.offset, layer->options().index(),
                                                    layer->options().num_bits_d(), layer->shape_)));
    }
  }
  if (ready <= written_) return;
  written_ = ready;
  ScaleOffsetRecord record = ReadRecord(record_);
  for (size_t i = 0; i < factors.size(); ++i) {
    SetInput(factors[i].second, EntryOf(factors[i].first, &record));
  }
  WriteRecord(record_, record);
  for (size_t i = 0; i < factors.size(); ++i) {
    LOG(INFO) << "Do layer " << factors[i].first << " activation calibration success!";
  }
}

}  // namespace amct
}  // namespace caffe
