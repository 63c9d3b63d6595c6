#include "transport/shared_segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <random>
#include <string>

namespace ddl {
namespace {

Status Failure(const std::string& what, int error) {
  return Status(Code::kInternal, "Shared memory: " + what + ": " + std::strerror(error) +
                                     ". DDL_TRANSPORT=mpi does without.");
}

}  // namespace

SharedSegment::~SharedSegment() {
  Seal();
  if (memory_ != nullptr) munmap(memory_, nbytes_);
}

Status SharedSegment::Map(int64_t nbytes) {
  // Populated now, so that no collective pays for page faults.
  void* memory = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, file_, 0);
  if (memory == MAP_FAILED) return Failure("mmap", errno);
  memory_ = static_cast<char*>(memory);
  nbytes_ = nbytes;
  return Status();
}

Status SharedSegment::Create(int64_t nbytes, Address* address) {
  nbytes += kHeaderBytes;
  file_ = memfd_create("ddl", MFD_CLOEXEC);
  if (file_ < 0) return Failure("memfd_create", errno);
  // Reserves the pages: later, too little memory would be a SIGBUS.
  int error = 0;
  do {
    error = posix_fallocate(file_, 0, nbytes);
  } while (error == EINTR);
  if (error != 0) {
    return Failure("cannot reserve " + std::to_string(nbytes) + " bytes", error);
  }
  DDL_RETURN_IF_ERROR(Map(nbytes));
  std::random_device random;
  const uint64_t cookie = (uint64_t{random()} << 32) | random();
  std::memcpy(memory_, &cookie, sizeof(cookie));
  *address = {getpid(), file_, nbytes, cookie};
  return Status();
}

Status SharedSegment::Attach(const Address& address) {
  const std::string path =
      "/proc/" + std::to_string(address.pid) + "/fd/" + std::to_string(address.file);
  file_ = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (file_ < 0) return Failure("cannot open " + path, errno);
  // In another container the path may lead to a file of somebody else.
  if (lseek(file_, 0, SEEK_END) != address.nbytes) return Failure(path + " is not ours", EINVAL);
  DDL_RETURN_IF_ERROR(Map(address.nbytes));
  uint64_t cookie = 0;
  std::memcpy(&cookie, memory_, sizeof(cookie));
  return cookie == address.cookie ? Status() : Failure(path + " is not ours", EINVAL);
}

void SharedSegment::Seal() {
  if (file_ >= 0) close(file_);
  file_ = -1;
}

void* SharedSegment::base() const { return memory_ + kHeaderBytes; }

}  // namespace ddl
