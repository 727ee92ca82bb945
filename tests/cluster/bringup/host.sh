#!/bin/bash
# The first process of one host: host.sh STATE NAME [FOLDER ...]
# Started in fresh net, uts, mount, ipc and pid namespaces; when it ends, the kernel ends everything on the host.
# It gives the host a name, an address book and file systems of its own. Everything else stays shared, as on NFS.
# FOLDER: a folder below /tmp that the host shall see all the same (a checkout there).
set -eu
state=$1 name=$2
shift 2
own=$state/hosts/$name

# /proc is still the one of whoever started us, so this is our process id as seen from there.
read -r pid _ </proc/self/stat

hostname "$name"
mount -t proc proc /proc
mount --bind "$own/hostname" /etc/hostname
for file in hosts resolv.conf nsswitch.conf; do
    mount --bind "$state/etc/$file" "/etc/$file"
done
mount -t tmpfs -o mode=1777 shm /dev/shm

# A new sysfs shows this host's interfaces. slurmd wants something on /sys/fs/cgroup, which the new one lacks.
mkdir -p "$own/sys" "$own/tmp"
mount -t sysfs sysfs "$own/sys"
mount --rbind /sys/fs/cgroup "$own/sys/fs/cgroup"
mount --move "$own/sys" /sys

mount -t tmpfs -o mode=1777 tmp "$own/tmp"
for folder in "$@"; do
    mkdir -p "$own/tmp${folder#/tmp}"
    mount --rbind "$folder" "$own/tmp${folder#/tmp}"
done
mount --move "$own/tmp" /tmp

mount -t tmpfs -o mode=755 run /run
mkdir -p /run/lock /run/munge /run/slurm
mount --bind "$state/munge" /run/munge # one munged serves all hosts: its door is a path
[ ! -d "$state/slurm" ] || mount --bind "$state/slurm" /etc/slurm

ip link set lo up
[ "$name" != login ] || {
    number=0
    while read -r address; do
        # a bridge without an address of its own has that of one of its nodes, and a new one when that node dies
        ip link add "br$number" address "02:00:00:00:66:0$number" type bridge
        # shellcheck disable=SC2086 # an address and how to add it
        ip addr add $address dev "br$number"
        ip link set "br$number" up
        number=$((number + 1))
    done <"$own/addresses"
}
echo "$pid" >"$own/pid.new"
mv "$own/pid.new" "$own/pid"

# bash, as the host's process 1, reaps what daemons leave behind
while :; do
    sleep 1000000 &
    wait $! || :
done
