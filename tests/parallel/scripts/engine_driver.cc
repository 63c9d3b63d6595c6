// The engine without TensorFlow: starts in milliseconds, so that endings whose messages cross on
// the way can be tried many times. argv: how the job ends. Prints "<rank> code sum" for each
// collective.

#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <future>
#include <utility>

#include "runtime/engine.h"

namespace {

void Total(int rank) {
  float values[] = {1.0f, static_cast<float>(rank)};
  ddl::TensorBuffer buffer;
  buffer.in = buffer.out = values;
  buffer.count = 2;
  buffer.dims = {2};
  ddl::Request request;
  request.op_name = "AllReduceN";
  request.name = "total";
  request.tensors.push_back(buffer);
  std::promise<ddl::Status> finished;
  request.done = [&finished](const ddl::Status& status) { finished.set_value(status); };
  ddl::Engine::Get().Submit(std::move(request));
  const ddl::Status status = finished.get_future().get();
  std::printf("<%d> %d %g\n", rank, static_cast<int>(status.code()),
              status.ok() ? values[0] * 100 + values[1] : 0.0f);
  std::fflush(stdout);
}

}  // namespace

int main(int, char** arguments) {
  ddl::Topology topology;
  if (!ddl::Engine::Get().Start(&topology).ok()) return 1;
  const char* how = arguments[1];
  Total(topology.rank);
  if (std::strcmp(how, "root is missing") == 0 && topology.rank == 0) usleep(800 * 1000);
  if (std::strcmp(how, "member is missing") == 0 && topology.rank == 1) usleep(800 * 1000);
  if (std::strcmp(how, "root leaves") == 0 && topology.rank == 0) return 0;
  if (std::strcmp(how, "member leaves") == 0 && topology.rank == 1) return 0;
  for (int i = 0; i < 50; ++i) Total(topology.rank);
  return 0;
}
