// Runs nets and solvers of a real Caffe for the tests:
//   run_caffe forward MODEL WEIGHTS PASSES RESULTS [BLOB...]
//   run_caffe solve SOLVER PARAMETERS [WEIGHTS or SOLVERSTATE]
// PASSES holds int32 and float32: the number of passes, then for each pass and each input of the net the number of axes, the
// axes, the values. RESULTS and PARAMETERS have the values of blobs, each behind its count; standard output has the names of
// the blobs, and the seconds of processor time that the passes took.
#include <stdint.h>
#include <time.h>

#include <fstream>
#include <iostream>
#include <string>
#include <vector>

#include "caffe/net.hpp"
#include "caffe/sgd_solvers.hpp"
#include "caffe/solver_factory.hpp"
#include "caffe/util/upgrade_proto.hpp"

using caffe::Blob;
using caffe::Net;
using std::string;
using std::vector;

static int32_t ReadInteger(std::ifstream* file) {
  int32_t value = 0;
  file->read(reinterpret_cast<char*>(&value), sizeof(value));
  CHECK(*file) << "the file of passes ends too early";
  return value;
}

static void ReadBlob(std::ifstream* file, Blob<float>* blob) {
  vector<int> shape(ReadInteger(file));
  for (size_t axis = 0; axis < shape.size(); ++axis) { shape[axis] = ReadInteger(file); }
  blob->Reshape(shape);
  file->read(reinterpret_cast<char*>(blob->mutable_cpu_data()), sizeof(float) * blob->count());
  CHECK(*file) << "the file of passes ends too early";
}

static void WriteBlob(std::ofstream* file, const Blob<float>& blob) {
  const int32_t count = blob.count();
  file->write(reinterpret_cast<const char*>(&count), sizeof(count));
  file->write(reinterpret_cast<const char*>(blob.cpu_data()), sizeof(float) * count);
}

static int Forward(int argc, char** argv) {
  Net<float> net(argv[2], caffe::TEST);
  net.CopyTrainedLayersFrom(argv[3]);
  vector<string> names(argv + 6, argv + argc);
  if (names.empty()) {
    for (int index : net.output_blob_indices()) { names.push_back(net.blob_names()[index]); }
  }
  for (const string& name : names) { std::cout << "blob " << name << "\n"; }
  std::ifstream given(argv[4], std::ios::binary);
  std::ofstream results(argv[5], std::ios::binary);
  clock_t spent = 0;
  for (int32_t left = ReadInteger(&given); left > 0; --left) {
    for (Blob<float>* blob : net.input_blobs()) { ReadBlob(&given, blob); }
    const clock_t start = clock();
    net.Forward();
    spent += clock() - start;
    for (const string& name : names) { WriteBlob(&results, *net.blob_by_name(name)); }
  }
  std::cout << "seconds " << static_cast<double>(spent) / CLOCKS_PER_SEC << std::endl;
  return 0;
}

static int Solve(int argc, char** argv) {
  caffe::SolverParameter parameter;
  caffe::ReadSolverParamsFromTextFileOrDie(argv[2], &parameter);
  caffe::shared_ptr<caffe::Solver<float> > solver(caffe::SolverRegistry<float>::CreateSolver(parameter));
  const string start = argc > 4 ? argv[4] : "";
  const bool goes_on = start.find(".solverstate") != string::npos;
  if (!goes_on && !start.empty()) { solver->net()->CopyTrainedLayersFrom(start); }
  solver->Solve(goes_on ? start.c_str() : NULL);
  std::ofstream results(argv[3], std::ios::binary);
  for (size_t layer = 0; layer < solver->net()->layers().size(); ++layer) {
    for (const auto& blob : solver->net()->layers()[layer]->blobs()) {
      std::cout << "blob " << solver->net()->layer_names()[layer] << "\n";
      WriteBlob(&results, *blob);
    }
  }
  return 0;
}

int main(int argc, char** argv) {
  FLAGS_logtostderr = 1;
  ::google::InitGoogleLogging(argv[0]);
  caffe::Caffe::set_mode(caffe::Caffe::CPU);
  if (argc >= 6 && string(argv[1]) == "forward") { return Forward(argc, argv); }
  if (argc >= 4 && string(argv[1]) == "solve") { return Solve(argc, argv); }
  std::cerr << "run_caffe forward MODEL WEIGHTS PASSES RESULTS [BLOB...]\n"
            << "run_caffe solve SOLVER PARAMETERS [WEIGHTS or SOLVERSTATE]" << std::endl;
  return 2;
}
