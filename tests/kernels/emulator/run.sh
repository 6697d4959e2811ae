#!/bin/sh
# Tries the AVX-512 kernels on a machine without AVX-512: under Bochs, beside the generic kernels.
#
#     sh tests/kernels/emulator/run.sh FOLDER VMLINUZ
#
# FOLDER takes what is made; VMLINUZ is a Linux kernel with a serial console (Debian's
# linux-image-cloud-amd64 has one). Needs g++, cpio, grub-mkrescue with its BIOS files, xorriso,
# mtools, and bochs with bochsbios, vgabios and bochs-term. Takes minutes; the last lines say how many
# problems were tried and how many failed. Bochs has no AVX512-BF16.
set -e
ROOT="$(cd "$(dirname "$0")/../../.." && pwd)"
KERNELS="$ROOT/kernels/cpu"
mkdir -p "$1/root" "$1/iso/boot/grub"
cd "$1"
FLAGS="-I$KERNELS/include -std=c++20 -O3 -fno-math-errno -ffp-contract=fast -w"
AVX512="-mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512vl -mavx512dq"
for part in attention linear; do
    g++ $FLAGS -DAIOENGINE_KERNELS=generic -c "$KERNELS/arithmetic/$part.cpp" -o "${part}_generic.o"
    g++ $FLAGS $AVX512 -DAIOENGINE_KERNELS=avx512 -c "$KERNELS/arithmetic/$part.cpp" -o "${part}_avx512.o"
done
# It is the machine's first and only process.
g++ -std=c++20 -O2 -static -DINSTRUCTION_SET=avx512 -I"$KERNELS/include" \
    "$ROOT/tests/kernels/emulator/twins.cpp" ./*.o -o root/init
(cd root && echo init | cpio -o -H newc --quiet) | gzip > iso/boot/initrd.gz
cp "$2" iso/boot/vmlinuz
# Linux gives up AVX where XSAVES takes another size than it expects, as Bochs's does: it is told
# not to use that (323) nor XSAVEC (321).
cat > iso/boot/grub/grub.cfg <<'EOF'
set timeout=0
menuentry twins {
    linux /boot/vmlinuz console=ttyS0 mitigations=off nokaslr tsc=reliable lpj=1000000 panic=-1 clearcpuid=321,323
    initrd /boot/initrd.gz
}
EOF
grub-mkrescue -o twins.iso iso 2> /dev/null
cat > bochsrc <<'EOF'
megs: 512
romimage: file=/usr/share/bochs/BIOS-bochs-latest
vgaromimage: file=/usr/share/bochs/VGABIOS-lgpl-latest
cpu: model=corei7_skylake_x, count=1, ips=200000000, reset_on_triple_fault=0
ata0: enabled=1
ata0-master: type=cdrom, path=twins.iso, status=inserted
boot: cdrom
com1: enabled=1, mode=file, dev=serial.txt
display_library: rfb, options="timeout=0"
log: bochs.log
clock: sync=none
panic: action=fatal
EOF
# Debian's Bochs has a debugger, which waits to be told to continue.
{ echo c; sleep 3600; } | timeout 3600 bochs -q -f bochsrc > bochs.out 2>&1 || true
grep -E "problems|differ" serial.txt
