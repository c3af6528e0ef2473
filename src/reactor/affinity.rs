//! Which cores there are, and binding a thread to one.

#![forbid(unsafe_code)]

use nix::errno::Errno;
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::Pid;

/// The cores this process may run on, ascending.
pub(super) fn allowed_cores() -> Result<Vec<usize>, Errno> {
    let set = sched_getaffinity(Pid::from_raw(0))?;
    Ok((0..CpuSet::count()).filter(|core| set.is_set(*core).unwrap_or(false)).collect())
}

/// All allowed cores but the first, which is left to the control thread and the system; at least one.
pub(super) fn default_cores() -> Result<Vec<usize>, Errno> {
    let mut cores = allowed_cores()?;
    if cores.len() > 1 {
        cores.remove(0);
    }
    Ok(cores)
}

/// Binds the calling thread to `core`.
pub(super) fn bind(core: usize) -> Result<(), Errno> {
    let mut set = CpuSet::new();
    set.set(core)?;
    sched_setaffinity(Pid::from_raw(0), &set)
}
