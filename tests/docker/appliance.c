/* An appliance of one file, for images without anything else: `mjolnir version --json`, else HTTP on port 8000.
 * Answers 200 to everything, or 503 where the variable BROKEN of its image is set. Ends on SIGTERM at once. */
#include <netinet/in.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

static void quit(int number) { (void)number; _exit(0); }

int main(int count, char **words) {
  if (count > 1 && !strcmp(words[1], "version")) return puts("{\"mjolnir\": \"0\"}") < 0;
  signal(SIGTERM, quit);
  signal(SIGPIPE, SIG_IGN);
  const char *code = getenv("BROKEN") ? "503 Service Unavailable" : "200 OK";
  char answer[128], request[4096];
  int length = sprintf(answer, "HTTP/1.1 %s\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}", code);
  int yes = 1, server = socket(AF_INET, SOCK_STREAM, 0);
  setsockopt(server, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
  struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(8000)};
  if (bind(server, (struct sockaddr *)&address, sizeof address) || listen(server, 16)) return 1;
  fprintf(stderr, "listening, %s\n", code);
  for (;;) {
    int client = accept(server, 0, 0);
    if (client < 0) continue;
    if (read(client, request, sizeof request) > 0 && write(client, answer, length) < 0) perror("write");
    close(client);
  }
}
