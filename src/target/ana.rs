//! Asymmetric namespace access: how the namespaces of a subsystem are reached by one of its listeners (Base 2.0, 8.20).
//!
//! ```text
//!   operator ──set──▶ Access (one per listener) ──┬─ each queue, between two turns ─▶ Path ─▶ the commands that use it
//!                       │ a state per ANA group   └─ log page 0Ch, Identify, events
//!                       └─ permits that were withdrawn: until the last is dropped, something still runs
//! ```
//!
//! A queue takes the states over together with the namespaces, so that a command is judged by what the queue has at hand:
//! no lock, and no word that other cores write. A [`Path`] by which commands may run holds its group's [`Permit`]. When
//! a group becomes inaccessible its permit is withdrawn: queues drop it between two turns, running commands as they end. Who
//! withdrew it waits for that, and knows then that nothing which came by this listener is written any more.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::ops::Deref;
use std::rc::Rc;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use zerocopy::{FromZeros, IntoBytes};

use super::job::NamespaceRef;
use super::namespace::{Namespace, NamespaceMap};
use crate::nvme::features::fid;
use crate::nvme::log::{AnaGroupDescriptor, AnaLogHeader, ana_state};
use crate::nvme::status::Status;

/// How long a group stays in [`AnaState::Change`] at most, seconds (ANATT): a host waits for it before it gives a path up.
pub const TRANSITION_TIME_S: u8 = 10;
/// RGO, bit 0 of the Log Specific Parameter of log page 0Ch: groups only, no namespaces (Base 5.16.1.13).
pub const RETURN_GROUPS_ONLY: u8 = 1;

/// The state of an ANA group on the controllers of one listener (Base 2.0, 8.20.3).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum AnaState {
    /// Commands run, and this is the way to send them.
    #[default]
    Optimized,
    /// Commands run, but another way is better.
    NonOptimized,
    /// No command runs; that may change.
    Inaccessible,
    /// No command runs, and none will.
    PersistentLoss,
    /// Between two of the others.
    Change,
}

impl AnaState {
    /// Every state, in the order of their codes.
    pub const ALL: [AnaState; 5] = [
        AnaState::Optimized,
        AnaState::NonOptimized,
        AnaState::Inaccessible,
        AnaState::PersistentLoss,
        AnaState::Change,
    ];

    /// Whether commands that need the namespace are run.
    pub fn is_accessible(self) -> bool {
        self.refusal().is_none()
    }

    /// The status of commands that need the namespace. Without Do Not Retry: by another path they may run.
    pub fn refusal(self) -> Option<Status> {
        match self {
            AnaState::Optimized | AnaState::NonOptimized => None,
            AnaState::Inaccessible => Some(Status::ANA_INACCESSIBLE),
            AnaState::PersistentLoss => Some(Status::ANA_PERSISTENT_LOSS),
            AnaState::Change => Some(Status::ANA_TRANSITION),
        }
    }

    /// The name operators know it by, which is SPDK's.
    pub fn name(self) -> &'static str {
        match self {
            AnaState::Optimized => "optimized",
            AnaState::NonOptimized => "non_optimized",
            AnaState::Inaccessible => "inaccessible",
            AnaState::PersistentLoss => "persistent_loss",
            AnaState::Change => "change",
        }
    }

    /// The state of that name.
    pub fn from_name(name: &str) -> Option<AnaState> {
        AnaState::ALL.into_iter().find(|state| state.name() == name)
    }

    /// Its code in log page 0Ch (Base figure 228).
    fn code(self) -> u8 {
        match self {
            AnaState::Optimized => ana_state::OPTIMIZED,
            AnaState::NonOptimized => ana_state::NON_OPTIMIZED,
            AnaState::Inaccessible => ana_state::INACCESSIBLE,
            AnaState::PersistentLoss => ana_state::PERSISTENT_LOSS,
            AnaState::Change => ana_state::CHANGE,
        }
    }
}

/// The right to run commands on the namespaces of a group; who holds one may still write.
#[derive(Debug, Default)]
pub struct Permit(());

/// A namespace as the queues of one listener reach it.
pub struct Path {
    namespace: Arc<Namespace>,
    /// The status of every command, unless they run.
    pub refusal: Option<Status>,
    permit: Option<Arc<Permit>>,
}

impl Path {
    /// A path that no state governs, for work that hosts may ask for by any.
    pub fn unconditional(namespace: Arc<Namespace>) -> NamespaceRef {
        Rc::new(Path { namespace, refusal: None, permit: None })
    }

    /// What becomes of a command that waits on this path, now that its queue has `now` for its NSID: `None` if it waits on.
    pub fn verdict(&self, now: Option<&Path>) -> Option<Status> {
        let is_same = |now: &&Path| Arc::ptr_eq(&now.namespace, &self.namespace);
        let Some(now) = now.filter(is_same) else { return Some(Status::INVALID_NAMESPACE.with_dnr()) };
        match (&self.permit, &now.permit) {
            (Some(held), Some(given)) if Arc::ptr_eq(held, given) => None,
            (None, None) if now.refusal == self.refusal => None,
            // Withdrawn and given anew between two turns: it must not be used any more.
            _ => Some(now.refusal.unwrap_or(Status::ANA_TRANSITION)),
        }
    }
}

impl Deref for Path {
    type Target = Namespace;

    fn deref(&self) -> &Namespace {
        &self.namespace
    }
}

/// The states of one listener.
#[derive(Default)]
pub struct Access {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// That of groups which have none of their own.
    all: AnaState,
    groups: BTreeMap<u32, Group>,
    /// CHGCNT of the log: moves with everything in it.
    changes: u64,
    /// Permits that were withdrawn, with their group.
    withdrawn: Vec<(u32, Weak<Permit>)>,
}

struct Group {
    state: AnaState,
    /// CHGCNT when it last changed.
    changed: u64,
    permit: Option<Arc<Permit>>,
}

impl Access {
    fn state(&self) -> MutexGuard<'_, State> {
        // A panic elsewhere cannot leave it half changed: nothing below panics.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The namespaces, as they are reached, by NSID - 1.
    pub fn reach(&self, map: &NamespaceMap) -> Vec<Option<NamespaceRef>> {
        let mut state = self.state();
        let mut path = |namespace: &Arc<Namespace>| {
            let group = state.group(namespace.ana_group);
            let refusal = group.state.refusal();
            let permit = match refusal {
                None => Some(Arc::clone(group.permit.get_or_insert_default())),
                Some(_) => None,
            };
            Rc::new(Path { namespace: Arc::clone(namespace), refusal, permit })
        };
        (1..=map.highest_nsid()).map(|nsid| map.get(nsid).map(&mut path)).collect()
    }

    /// The state of a group.
    pub fn of(&self, group: u32) -> AnaState {
        let state = self.state();
        state.groups.get(&group).map_or(state.all, |group| group.state)
    }

    /// Changes one group, or all of them. False if it was so already.
    pub(super) fn set(&self, group: Option<u32>, to: AnaState) -> bool {
        let mut state = self.state();
        let State { all, groups, changes, withdrawn } = &mut *state;
        let mut is_change = false;
        match group {
            Some(group) => {
                groups.entry(group).or_insert(Group { state: *all, changed: *changes, permit: None });
            }
            None => is_change = std::mem::replace(all, to) != to,
        }
        for (&id, known) in groups.iter_mut().filter(|(id, _)| group.is_none_or(|group| group == **id)) {
            if known.state == to {
                continue;
            }
            is_change = true;
            known.state = to;
            known.changed = *changes + 1;
            if !to.is_accessible()
                && let Some(permit) = known.permit.take()
            {
                withdrawn.push((id, Arc::downgrade(&permit)));
            }
        }
        *changes += u64::from(is_change);
        is_change
    }

    /// The permits of one group, or of all, that were withdrawn and are still held.
    pub(super) fn withdrawn(&self, group: Option<u32>) -> Vec<Weak<Permit>> {
        let mut state = self.state();
        state.withdrawn.retain(|(_, permit)| permit.strong_count() > 0);
        let wanted = state.withdrawn.iter().filter(|(id, _)| group.is_none_or(|group| group == *id));
        wanted.map(|(_, permit)| permit.clone()).collect()
    }

    /// A namespace of the group came or went: the log is another one.
    pub(super) fn touch(&self, group: u32) {
        let mut state = self.state();
        state.changes += 1;
        let changes = state.changes;
        state.group(group).changed = changes;
    }

    /// Log page 0Ch (Base 5.16.1.13): the groups that have namespaces, with their namespaces unless `groups_only`. Zeros
    /// follow up to the length it may have by what Identify says of a subsystem of `max_namespaces`: hosts that read by
    /// that length, in pieces as nvme-cli does, do not ask for more than there is.
    pub fn log(&self, map: &NamespaceMap, groups_only: bool, max_namespaces: u32) -> Vec<u8> {
        let mut members = BTreeMap::<u32, Vec<u32>>::new();
        for namespace in map.iter() {
            members.entry(namespace.ana_group).or_default().push(namespace.nsid);
        }
        let mut state = self.state();
        let mut header = AnaLogHeader::new_zeroed();
        header.chgcnt = state.changes.into();
        header.ngrps = (members.len() as u16).into();
        let mut page = header.as_bytes().to_vec();
        for (id, nsids) in members {
            let group = state.group(id);
            let mut descriptor = AnaGroupDescriptor::new_zeroed();
            descriptor.grpid = id.into();
            descriptor.chgcnt = group.changed.into();
            descriptor.state = group.state.code();
            if !groups_only {
                descriptor.nnsids = (nsids.len() as u32).into();
            }
            page.extend_from_slice(descriptor.as_bytes());
            if !groups_only {
                page.extend(nsids.iter().flat_map(|nsid| nsid.to_le_bytes()));
            }
        }
        let len_max = log_len_max(max_namespaces);
        page.resize(page.len().max(len_max), 0);
        page
    }
}

/// The header, and for each possible namespace a group and an NSID.
fn log_len_max(max_namespaces: u32) -> usize {
    let each = size_of::<AnaGroupDescriptor>() + size_of::<u32>();
    size_of::<AnaLogHeader>() + max_namespaces as usize * each
}

impl State {
    fn group(&mut self, id: u32) -> &mut Group {
        let fresh = Group { state: self.all, changed: self.changes, permit: None };
        self.groups.entry(id).or_insert(fresh)
    }
}

/// Whether Get Features (or Set Features, with `sets`) of feature `feature` runs for a namespace in this state: what is kept
/// with the namespace cannot be reached (Base 2.0, 8.20.3.3 to 8.20.3.5).
pub fn check_feature(state: AnaState, feature: u8, sets: bool) -> Result<(), Status> {
    let is_with_namespace = matches!(
        feature,
        fid::ERROR_RECOVERY
            | fid::WRITE_ATOMICITY
            | fid::RESERVATION_NOTIFICATION_MASK
            | fid::RESERVATION_PERSISTENCE
            | fid::NAMESPACE_WRITE_PROTECT
    );
    match state.refusal() {
        Some(status) if is_with_namespace || (sets && state == AnaState::PersistentLoss) => Err(status),
        _ => Ok(()),
    }
}

#[cfg(test)]
#[path = "ana/tests.rs"]
mod tests;
