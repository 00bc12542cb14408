/* Preloaded into a process, names do not resolve while the file that RESOLVER_GONE names is there; addresses do. */

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <netdb.h>
#include <stdlib.h>
#include <unistd.h>

typedef int resolver(const char *, const char *, const struct addrinfo *, struct addrinfo **);

int getaddrinfo(const char *node, const char *service, const struct addrinfo *hints, struct addrinfo **found)
{
	resolver *libc = (resolver *)dlsym(RTLD_NEXT, "getaddrinfo");
	const char *gone = getenv("RESOLVER_GONE");
	unsigned char address[16];
	int is_name = node && inet_pton(AF_INET, node, address) != 1 && inet_pton(AF_INET6, node, address) != 1;

	if (is_name && gone && access(gone, F_OK) == 0)
		return EAI_AGAIN;
	return libc(node, service, hints, found);
}
