//! Faults put into the pool on purpose, each one line away from the truth: the simulator must find every one of them, or
//! what it proves is little. In anything but a test they do not exist.
#![forbid(unsafe_code)]

/// What is done wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sabotage {
    /// A flush writes the journal, but does not flush the devices.
    SkipFlush,
    /// A commit writes its root before its pages are durable.
    RootFirst,
    /// Freed blocks are used again before the commit that freed them is durable.
    FreeEarly,
    /// Blocks are used again while a read still looks at them.
    ForgetReads,
    /// One shard goes on with writes while a snapshot is taken, and is sealed later than the others.
    SealLate,
    /// A snapshot does not hold commits back until its catalog record is durable.
    ForgetHold,
    /// What a snapshot holds is not flushed before it is answered.
    ForgetSnapshotFlush,
    /// The journal is not told of trims.
    ForgetTrim,
    /// Replay takes records for true whose data never arrived.
    TrustRecords,
    /// A hole forgets when it became one.
    ForgetHole,
    /// A write with FUA is answered like any other.
    IgnoreFua,
    /// The second copy of a commit's metadata is not written.
    OneCopy,
    /// A pin is kept in memory alone.
    ForgetPin,
    /// A difference does not tell of what became zero.
    ForgetZeroes,
}

#[cfg(test)]
thread_local! {
    static ACTIVE: std::cell::Cell<Option<Sabotage>> = const { std::cell::Cell::new(None) };
}

/// Puts a fault into the pools of this thread, or takes it out again.
#[cfg(test)]
pub fn set(what: Option<Sabotage>) {
    ACTIVE.set(what);
}

/// Whether this is to be done wrong.
#[cfg(test)]
pub(super) fn is(what: Sabotage) -> bool {
    ACTIVE.get() == Some(what)
}

/// Whether this is to be done wrong.
#[cfg(not(test))]
pub(super) const fn is(_: Sabotage) -> bool {
    false
}
