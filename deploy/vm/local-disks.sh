#!/bin/sh
# Mount this machine's local NVMe disks as one: local-disks FOLDER USER
#
# They are blank after each stop of the machine and keep what they hold over a restart, so it runs at each start;
# what has a file system is not formatted. Without such disks FOLDER stays where it is, on the root disk.
# FOLDER/USER is made for USER.
set -eu
folder=$1
user=$2
# By the names that GCP and AWS give them (links; udev makes several for one disk). DISKS is for trying it out.
disks=${DISKS-$(readlink -f /dev/disk/by-id/google-local-nvme-ssd-* /dev/disk/by-id/google-local-ssd-block* \
    /dev/disk/by-id/nvme-Amazon_EC2_NVMe_Instance_Storage_* 2>/dev/null | sort -u |
    while read -r disk; do if [ -b "$disk" ]; then echo "$disk"; fi; done)}

mkdir -p "$folder"
if mountpoint -q "$folder"; then
    echo "$folder is mounted"
elif [ -z "$disks" ]; then
    echo "no local disk: $folder is on the root disk" >&2
else
    # shellcheck disable=SC2086 # words
    set -- $disks
    device=$1
    if [ $# -gt 1 ]; then
        device=/dev/md/wds-async
        # The array of an earlier start, else a new one: RAID 0, because what is lost is fetched again.
        mdadm --assemble "$device" "$@" 2>/dev/null ||
            mdadm --create "$device" --run --level=0 --chunk=512 --raid-devices=$# "$@"
    fi
    # No journal to replay and no room kept for root: it is a cache, and each chunk is checked when it is read.
    blkid "$device" >/dev/null || mkfs.ext4 -q -m 0 -E lazy_itable_init=1,nodiscard "$device"
    mount -o noatime,discard "$device" "$folder"
fi
install -d -o "$user" -g "$user" -m 0750 "$folder/$user"
