#!/bin/bash
# cluster.sh DIR PORT: a Slurm of two nodes on this machine, in a second: as root, without systemd and cgroups.
# Its ports are PORT to PORT + 2. Stop it by the pids in DIR/*.pid. The eight GPUs of a node are empty files.
# munged, too, is its own: the socket in /run/munge may be left from a daemon that was killed, and then Slurm waits for ever.
set -e
D=$1 H=$(hostname -s)
mkdir -p "$D"/state "$D"/log "$D"/spool.n0 "$D"/spool.n1
(umask 077 && head -c 1024 /dev/urandom > "$D"/munge.key)
munged --force --key-file="$D"/munge.key --socket="$D"/munge.socket --pid-file="$D"/munged.pid \
    --seed-file="$D"/munge.seed --log-file="$D"/log/munged.log
cat > "$D"/slurm.conf << C
ClusterName=ci
SlurmctldHost=$H(127.0.0.1)
SlurmctldPort=$2
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$D/munge.socket,cred_expire=5
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0,bf_interval=1
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=10
KillWait=30
StateSaveLocation=$D/state
SlurmdSpoolDir=$D/spool.%n
SlurmctldPidFile=$D/slurmctld.pid
SlurmdPidFile=$D/slurmd.%n.pid
SlurmctldLogFile=$D/log/slurmctld.log
SlurmdLogFile=$D/log/slurmd.%n.log
GresTypes=gpu
NodeName=n0 NodeHostname=$H NodeAddr=127.0.0.1 Port=$(($2 + 1)) CPUs=64 Gres=gpu:8
NodeName=n1 NodeHostname=$H NodeAddr=127.0.0.1 Port=$(($2 + 2)) CPUs=64 Gres=gpu:8
PartitionName=all Nodes=n[0-1] Default=YES OverSubscribe=YES:4 MaxTime=INFINITE
C
touch "$D"/gpu{0..7}
echo "NodeName=n[0-1] Name=gpu File=$D/gpu[0-7]" > "$D"/gres.conf
echo "127.0.0.1 localhost $H n0 n1" > "$D"/hosts
export SLURM_CONF=$D/slurm.conf
slurmctld -c
# n0 and n1 resolve in a mount namespace of their own; the machine's /etc/hosts stays as it is
unshare -m --propagation private bash -c "mount --bind $D/hosts /etc/hosts; slurmd -N n0; slurmd -N n1"
for _ in $(seq 200); do
    [ "$(sinfo -h -t idle -o %D)" = 2 ] && exit 0
    sleep 0.1
done
sinfo -R
exit 1
