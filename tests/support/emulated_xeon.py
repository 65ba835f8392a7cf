"""Programs on a Xeon with AVX512 that Bochs emulates, for processors without it.

Needs Bochs 3 with its terminal (Debian: bochs, bochs-term), isolinux, xorriso, cpio, and a Linux
kernel: /vmlinuz, as Debian links it, or the one that PACELINE_KERNEL names.
Bochs enables no AMX under Linux: it has no XFD.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

BOCHS = os.environ.get("PACELINE_BOCHS", "bochs").split()
KERNEL = Path(os.environ.get("PACELINE_KERNEL", "/vmlinuz"))
BOOT = (Path("/usr/lib/ISOLINUX/isolinux.bin"), Path("/usr/lib/syslinux/modules/bios/ldlinux.c32"))
_TOOLS = (BOCHS[0], "xorriso", "cpio", "script")
AVAILABLE = all(map(shutil.which, _TOOLS)) and KERNEL.exists() and BOOT[0].exists()
_MENU = """DEFAULT check
LABEL check
 KERNEL /vmlinuz
 INITRD /initrd
 APPEND quiet rdinit=/init mitigations=off no5lvl nokaslr lpj=1000000 tsc=reliable ibt=off \
initcall_blacklist=intel_pstate_init clearcpuid=amx_tile,amx_bf16,amx_int8
"""
_MACHINE = """cpu: model=sapphire_rapids, ips=100000000, ignore_bad_msrs=1
memory: guest=1024, host=1024
romimage: file=$BXSHARE/BIOS-bochs-latest
vgaromimage: file=$BXSHARE/VGABIOS-lgpl-latest
ata0-master: type=cdrom, path={image}, status=inserted
boot: cdrom
log: {log}
panic: action=fatal
error: action=ignore
display_library: term
port_e9_hack: enabled=1
"""
# Port 0xe9 is Bochs' output; "Shutdown" at port 0x8900 ends it.
_INIT = r"""
#include <stdio.h>
#include <stdlib.h>
#include <sys/io.h>
#include <sys/wait.h>
#include <unistd.h>
static void say(const char* s) { while (*s) outb(*s++, 0xe9); }
int main(int count, char** names) {
  const char* programs[] = {PROGRAMS, 0};
  iopl(3);
  setenv("OMP_NUM_THREADS", "1", 1);
  for (const char** p = programs; *p; p++) {
    int ends[2], status = 1;
    char line[256] = {0};
    if (pipe(ends)) return 1;
    say("<output>");
    pid_t child = fork();
    if (!child) dup2(ends[1], 1), dup2(ends[1], 2), close(ends[0]), execl(*p, *p, NULL), _exit(127);
    close(ends[1]);
    for (long n; (n = read(ends[0], line, 255)) > 0; say(line)) line[n] = 0;
    waitpid(child, &status, 0);
    snprintf(line, sizeof line, "<status %d>\n", status);
    say(line);
  }
  for (const char* s = "Shutdown"; *s; s++) outb(*s, 0x8900);
  for (;;) pause();
}
"""


def run(programs: Sequence[Path], folder: Path) -> list[tuple[int, str]]:
    """Wait status and output of each program. ``folder`` must be empty."""
    root, disk = folder / "root", folder / "disk"
    for made in (root, disk / "isolinux"):
        made.mkdir(parents=True)
    names = ", ".join(f'"/{program.name}"' for program in programs)
    (folder / "init.c").write_text(_INIT.replace("PROGRAMS", names))
    compiled = ["gcc", "-static", "-O1", "-w", str(folder / "init.c"), "-o", str(root / "init")]
    subprocess.run(compiled, check=True)
    for program in programs:
        shutil.copy(program, root)
        listed = subprocess.run(["ldd", program], capture_output=True, text=True, check=True)
        for library in re.findall(r"/\S+", listed.stdout):
            (root / library[1:]).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(library, root / library[1:])
    pack = f"find . | cpio --quiet -o -H newc > {disk / 'initrd'}"
    subprocess.run(pack, shell=True, check=True, cwd=root)
    shutil.copy(KERNEL, disk / "vmlinuz")
    for file in BOOT:
        shutil.copy(file, disk / "isolinux")
    (disk / "isolinux" / "isolinux.cfg").write_text(_MENU)
    image, machine = folder / "image.iso", folder / "bochsrc"
    boot = ["-b", "isolinux/isolinux.bin", "-no-emul-boot", "-boot-load-size", "4"]
    command = ["xorriso", "-as", "mkisofs", "-quiet", "-o", image, *boot, "-boot-info-table", disk]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    machine.write_text(_MACHINE.format(image=image, log=folder / "log"))
    # Its terminal needs one; `script` gives it one.
    inside = " ".join([*BOCHS, "-q", "-f", str(machine)])
    environment = {**os.environ, "TERM": "xterm"}
    done = subprocess.run(
        ["script", "-qc", inside, "/dev/null"], capture_output=True, env=environment, timeout=3600
    )
    shown = re.sub(rb"\x1b\[[0-9;?]*[a-zA-Z]|\x1b[()=>][A-Z0-9]?|\r", b"", done.stdout).decode(
        errors="replace"
    )
    results = re.findall(r"<output>(.*?)<status (\d+)>", shown, re.DOTALL)
    return [(int(status), output) for output, status in results]
