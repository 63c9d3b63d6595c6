#include "core/config.h"

#include <cmath>
#include <cstdlib>

#include "core/numbers.h"

namespace ddl {
namespace {

// Each takes 1.6 MiB of memory; more than these only wait for it.
constexpr int kMaxThreads = 64;

std::string Read(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

}  // namespace

Status ReadConfig(Config* config) {
  if (const std::string text = Read("DDL_STALL_TIMEOUT"); !text.empty()) {
    char* end = nullptr;
    const double seconds = ReadNumber(text.c_str(), &end);
    if (*end != '\0' || !std::isfinite(seconds) || seconds <= 0) {
      return Status(Code::kInvalidArgument, "DDL_STALL_TIMEOUT is '" + text +
                                                "'. Give a positive number of seconds, as in 60.");
    }
    config->stall_timeout_s = seconds;
  }
  if (const std::string level = Read("DDL_LOG"); !level.empty()) {
    if (level != "warning" && level != "info") {
      return Status(Code::kInvalidArgument,
                    "DDL_LOG is '" + level + "'. Give one of: warning, info.");
    }
    config->log_info = level == "info";
  }
  if (const std::string transport = Read("DDL_TRANSPORT"); !transport.empty()) {
    if (transport != "auto" && transport != "shm" && transport != "mpi") {
      return Status(Code::kInvalidArgument,
                    "DDL_TRANSPORT is '" + transport + "'. Give one of: auto, shm, mpi.");
    }
    config->transport = transport == "shm"   ? TransportChoice::kShm
                        : transport == "mpi" ? TransportChoice::kMpi
                                             : TransportChoice::kAuto;
  }
  if (const std::string threads = Read("DDL_THREADS"); !threads.empty()) {
    const bool digits = threads.find_first_not_of("0123456789") == std::string::npos;
    config->threads = digits && threads.size() < 4 ? std::atoi(threads.c_str()) : 0;
    if (config->threads < 1 || config->threads > kMaxThreads) {
      return Status(Code::kInvalidArgument, "DDL_THREADS is '" + threads +
                                                "'. Give a whole number from 1 to " +
                                                std::to_string(kMaxThreads) + ".");
    }
  }
  if (const std::string gpu = Read("DDL_GPU"); !gpu.empty()) {
    if (gpu != "auto" && gpu != "nccl" && gpu != "host") {
      return Status(Code::kInvalidArgument,
                    "DDL_GPU is '" + gpu + "'. Give one of: auto, nccl, host.");
    }
    config->gpu_transport = gpu == "nccl"   ? GpuTransport::kNccl
                            : gpu == "host" ? GpuTransport::kHost
                                            : GpuTransport::kAuto;
  }
  config->host_id = Read("DDL_HOSTID");
  config->progress_path = Read("DDL_PROGRESS");
  config->timeline_path = Read("DDL_TIMELINE");
  config->stats_path = Read("DDL_STATS");
  config->record_dir = Read("DDL_RECORD_DIR");
  return Status();
}

}  // namespace ddl
