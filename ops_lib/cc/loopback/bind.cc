// Preloaded into the processes of a training on one host: a server that would listen on all
// addresses listens on the loopback one. TensorFlow's parameter servers, and mpirun, listen on all
// whatever they are told, and ask nobody who they are.
//
// Not a security boundary: a program that calls the kernel by itself, or is started without
// LD_PRELOAD, goes around it.
//
// Source: bind(2), listen(2), ip(7), ipv6(7); RFC 4291, 2.5.5.2 for addresses of both families.

#include <arpa/inet.h>
#include <dlfcn.h>
#include <netinet/in.h>
#include <string.h>
#include <sys/socket.h>

namespace {

bool IsStream(int descriptor) {
  int type = 0;
  socklen_t size = sizeof(type);
  return getsockopt(descriptor, SOL_SOCKET, SO_TYPE, &type, &size) == 0 && type == SOCK_STREAM;
}

// Whether an IPv6 socket takes IPv4 as well: then its address is that of IPv4's loopback, by which
// others reach it.
bool TakesIpv4(int descriptor) {
  int only = 1;
  socklen_t size = sizeof(only);
  return getsockopt(descriptor, IPPROTO_IPV6, IPV6_V6ONLY, &only, &size) == 0 && only == 0;
}

// Writes the loopback address in place of all addresses. Returns whether those were meant.
bool Confine(int descriptor, const sockaddr* address, socklen_t length, sockaddr_storage* confined) {
  if (address == nullptr || length > sizeof(*confined)) return false;
  memcpy(confined, address, length);
  if (address->sa_family == AF_INET && length >= sizeof(sockaddr_in)) {
    auto* ip = reinterpret_cast<sockaddr_in*>(confined);
    if (ip->sin_addr.s_addr != htonl(INADDR_ANY)) return false;
    ip->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    return IsStream(descriptor);
  }
  if (address->sa_family == AF_INET6 && length >= sizeof(sockaddr_in6)) {
    auto* ip = reinterpret_cast<sockaddr_in6*>(confined);
    const in_addr_t mapped = htonl(INADDR_ANY);
    const bool any = IN6_IS_ADDR_UNSPECIFIED(&ip->sin6_addr) ||
                     (IN6_IS_ADDR_V4MAPPED(&ip->sin6_addr) &&
                      memcmp(&ip->sin6_addr.s6_addr[12], &mapped, sizeof(mapped)) == 0);
    if (!any) return false;
    const char* loopback = TakesIpv4(descriptor) ? "::ffff:127.0.0.1" : "::1";
    return inet_pton(AF_INET6, loopback, &ip->sin6_addr) == 1 && IsStream(descriptor);
  }
  return false;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) int bind(int descriptor, const sockaddr* address,
                                                           socklen_t length) noexcept {
  static const auto next = reinterpret_cast<decltype(&bind)>(dlsym(RTLD_NEXT, "bind"));
  sockaddr_storage confined;
  if (!Confine(descriptor, address, length, &confined)) return next(descriptor, address, length);
  return next(descriptor, reinterpret_cast<const sockaddr*>(&confined), length);
}

// A socket that was never bound gets all addresses from listen().
extern "C" __attribute__((visibility("default"))) int listen(int descriptor, int waiting) noexcept {
  static const auto next = reinterpret_cast<decltype(&listen)>(dlsym(RTLD_NEXT, "listen"));
  sockaddr_storage address;
  socklen_t length = sizeof(address);
  if (getsockname(descriptor, reinterpret_cast<sockaddr*>(&address), &length) == 0) {
    const bool unbound =
        (address.ss_family == AF_INET &&
         reinterpret_cast<const sockaddr_in*>(&address)->sin_port == 0) ||
        (address.ss_family == AF_INET6 &&
         reinterpret_cast<const sockaddr_in6*>(&address)->sin6_port == 0);
    if (unbound) bind(descriptor, reinterpret_cast<const sockaddr*>(&address), length);
  }
  return next(descriptor, waiting);
}
