#include "comm/mpi_finalize_barrier.h"

#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <mpi.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>

#include "core/backoff.h"

namespace ddl {
namespace {

// Where the host's PMIx server listens, as <server>;tcp4://<address>:<port>; empty without one.
std::string ServerUri() {
  constexpr char kName[] = "PMIX_SERVER_URI";  // and a version, in the environment of its ranks
  for (char** variable = environ; *variable != nullptr; ++variable) {
    const char* value = std::strchr(*variable, '=');
    if (std::strncmp(*variable, kName, sizeof(kName) - 1) == 0 && value != nullptr) return value + 1;
  }
  return "";
}

// Whether a file is a connection to a URI of a numeric address.
bool IsConnectedTo(const std::string& uri, int file) {
  sockaddr_storage peer{};
  socklen_t size = sizeof(peer);
  char address[NI_MAXHOST], port[NI_MAXSERV];
  auto* of_peer = reinterpret_cast<sockaddr*>(&peer);
  if (getpeername(file, of_peer, &size) != 0 || peer.ss_family == AF_UNIX ||
      getnameinfo(of_peer, size, address, sizeof(address), port, sizeof(port),
                  NI_NUMERICHOST | NI_NUMERICSERV) != 0) {
    return false;
  }
  const size_t colon = uri.rfind(':');
  return colon != std::string::npos && uri.substr(colon + 1) == port &&
         uri.find(address) != std::string::npos;
}

// A copy of this process's connection to the host's PMIx server, or -1.
int CopyServerConnection() {
  const std::string uri = ServerUri();
  DIR* files = uri.empty() ? nullptr : opendir("/proc/self/fd");
  int copy = -1;
  while (files != nullptr && copy < 0) {
    const dirent* entry = readdir(files);
    if (entry == nullptr) break;
    const int file = std::atoi(entry->d_name);  // 0 for . and .., too
    if (IsConnectedTo(uri, file)) copy = fcntl(file, F_DUPFD_CLOEXEC, 0);
  }
  if (files != nullptr) closedir(files);
  return copy;
}

// Makes the thread that keeps it end late.
struct LateEnd {
  ~LateEnd() { std::this_thread::sleep_for(MpiFinalizeBarrier::kDisconnectAfter); }
};

void OnPmixThread(int, void*) {
  thread_local LateEnd end;
  static_cast<void>(end);
}

// PMIx's client ends its thread when the server has answered its last message, and then disconnects.
void DisconnectLate() {
  using Done = void (*)(int status, void* data);
  using Deregister = int (*)(size_t handler, Done done, void* data);
  void* pmix = dlopen("libpmix.so.2", RTLD_LAZY | RTLD_NOLOAD);  // Open MPI's, if it is there
  if (pmix == nullptr) return;
  auto* deregister = reinterpret_cast<Deregister>(dlsym(pmix, "PMIx_Deregister_event_handler"));
  // There is no such handler. PMIx says so on its thread, and we are after that.
  if (deregister != nullptr) deregister(SIZE_MAX, OnPmixThread, nullptr);
  dlclose(pmix);
}

// Neither end holds the connection any more.
bool IsClosed(int connection) {
  tcp_info info{};
  socklen_t size = sizeof(info);
  return getsockopt(connection, IPPROTO_TCP, TCP_INFO, &info, &size) != 0 ||
         info.tcpi_state == TCP_CLOSE;
}

}  // namespace

void MpiFinalizeBarrier::Prepare(bool waits) {
  MPI_Comm host = MPI_COMM_NULL;
  if (MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &host) !=
      MPI_SUCCESS) {
    return;
  }
  int rank = 0, size = 1;
  MPI_Comm_rank(host, &rank);
  MPI_Comm_size(host, &size);
  if (size > 1) {
    SharedSegment::Address address;
    bool shared = rank == 0 && memory_.Create(sizeof(std::atomic<int32_t>), &address).ok();
    MPI_Bcast(&address, sizeof(address), MPI_BYTE, 0, host);
    if (rank != 0) shared = memory_.Attach(address).ok();
    int ready = shared && waits;
    MPI_Allreduce(MPI_IN_PLACE, &ready, 1, MPI_INT, MPI_MIN, host);
    if (ready) size_ = size;
    memory_.Seal();
  }
  MPI_Comm_free(&host);
  DisconnectLate();
  if (waits) server_ = CopyServerConnection();
}

void MpiFinalizeBarrier::Wait() {
  Backoff backoff;
  if (server_ >= 0) {
    while (!IsClosed(server_) && backoff.elapsed_s() < kMostS) backoff.Pause();
    close(server_);
  }
  if (size_ == 1) return;
  auto* arrived = static_cast<std::atomic<int32_t>*>(memory_.base());
  arrived->fetch_add(1);
  while (arrived->load() < size_ && backoff.elapsed_s() < kMostS) backoff.Pause();
}

}  // namespace ddl
