//! The scrub: everything a pool holds is read in the background, slowly enough that nobody notices.
//!
//! Each shard sweeps its own part on its own reactor, no faster than its share of the rate. What is damaged is healed
//! from its second copy, or kept in the damage list. Now and then the pool's catalog notes how far each shard has come,
//! so that a scrub goes on after a restart where it was.
#![forbid(unsafe_code)]

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::catalog::Transaction;
use super::damage::{DamageInfo, DamageState};
use super::error::PoolError;
use super::finding::{Findings, Kind, Names, Severity};
use super::home::Home;
use super::node::{Lineage, NodeId};
use super::picture::Picture;
use super::pointer::{BLOCK_BYTES, LEAVES_MAX};
use super::prove::{Broken, Proof};
use super::recover::Known;
use super::shard::Shard;
use super::space::Use;
use crate::device::IoError;
use crate::reactor::sync::Semaphore;
use crate::reactor::unix_now;

/// The key in the catalog.
const KEY: &str = "scrub";
/// How often the position is noted.
const NOTE_EVERY: Duration = Duration::from_secs(30);
/// How often progress is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(200);
/// The longest a shard sleeps to keep to its rate before it looks whether it shall stop.
const NAP: Duration = Duration::from_millis(100);
const BLOCK: u64 = BLOCK_BYTES as u64;
/// Bytes a second when nothing else was asked for.
const RATE_DEFAULT: u64 = 200 << 20;

/// A scrub that came to its end.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScrubEnd {
    /// Seconds since 1970.
    pub at: u64,
    /// Seconds from its start.
    pub seconds: u64,
    /// Bytes read.
    pub bytes: u64,
    /// Blocks that cannot be read.
    pub errors: u64,
    /// Copies written again.
    pub healed: u64,
}

/// What the catalog keeps of it.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
struct Noted {
    running: bool,
    rate: u64,
    started: u64,
    total: u64,
    done: u64,
    errors: u64,
    healed: u64,
    /// Of each shard: the node and the leaf that come next. Empty: from the beginning.
    places: Vec<(u32, u64)>,
    #[serde(default)]
    last: Option<ScrubEnd>,
}

/// How a scrub stands.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ScrubStatus {
    /// "running", "stopped" (it can go on), or "idle".
    pub state: &'static str,
    /// Bytes a second at most.
    pub rate: u64,
    /// Seconds since 1970 when it was started, if it runs or was stopped.
    pub started: Option<u64>,
    /// Bytes to read in all, as far as was known at the start.
    pub bytes_total: u64,
    /// Bytes read.
    pub bytes_done: u64,
    /// Blocks found that cannot be read.
    pub errors: u64,
    /// Copies written again.
    pub healed: u64,
    /// Seconds to go at the present pace.
    pub eta_seconds: Option<u64>,
    /// The last that came to its end.
    pub last_completed: Option<ScrubEnd>,
}

/// What home and shards tell each other.
#[derive(Default)]
struct Progress {
    stop: AtomicBool,
    rate: AtomicU64,
    bytes: AtomicU64,
    errors: AtomicU64,
    healed: AtomicU64,
    running: AtomicU32,
    places: Vec<ShardPlace>,
}

#[derive(Default)]
struct ShardPlace {
    node: AtomicU32,
    leaf: AtomicU64,
}

/// A pool's scrub, on its home reactor.
pub(super) struct Scrub {
    /// Starting and stopping are made one at a time.
    turn: Semaphore,
    noted: RefCell<Noted>,
    progress: RefCell<Option<Arc<Progress>>>,
    /// Bytes done when this process began, and when that was.
    begun: RefCell<(u64, u64)>,
}

impl Scrub {
    /// None yet.
    pub fn new() -> Scrub {
        Scrub {
            turn: Semaphore::new(1),
            noted: RefCell::default(),
            progress: RefCell::default(),
            begun: RefCell::default(),
        }
    }
}

impl Home {
    /// Takes up a scrub that was under way when the pool was closed.
    pub(super) async fn resume_scrub(self: &Rc<Self>) {
        let noted = {
            let catalog = self.catalog.borrow();
            let value = catalog.as_ref().and_then(|catalog| catalog.get(KEY).map(<[u8]>::to_vec));
            value.and_then(|value| serde_json::from_slice::<Noted>(&value).ok())
        };
        let Some(noted) = noted else { return };
        let running = noted.running;
        *self.scrub.noted.borrow_mut() = noted;
        if running {
            self.run_scrub();
        }
    }

    /// Starts a scrub, or lets one that was stopped go on; of one that runs, changes the rate.
    pub async fn scrub_start(
        self: &Rc<Self>,
        rate: Option<u64>,
        anew: bool,
    ) -> Result<ScrubStatus, PoolError> {
        let _turn = self.scrub.turn.acquire(1).await;
        self.check()?;
        if let (Some(progress), false) = (self.scrub.progress.borrow().as_ref(), anew) {
            if let Some(rate) = rate {
                progress.rate.store(rate, Ordering::Relaxed);
                self.scrub.noted.borrow_mut().rate = rate;
            }
            return Ok(self.scrub_status());
        }
        self.halt_scrub().await;
        let totals = self.owners.each(|shard| async move {
            let space = &shard.state.borrow().space;
            (space.used_count(Use::Data) + 2 * space.used_count(Use::Metadata)) * BLOCK
        });
        let total = totals.await?.into_iter().sum::<u64>() + self.fixed_bytes();
        {
            let mut noted = self.scrub.noted.borrow_mut();
            if anew || noted.places.is_empty() {
                let last = noted.last.take();
                let places = vec![(0, 0); usize::from(self.geometry.shards)];
                *noted =
                    Noted { started: unix_now(), total, places, last, rate: noted.rate, ..Noted::default() };
            }
            noted.running = true;
            noted.rate = rate.unwrap_or(if noted.rate == 0 { RATE_DEFAULT } else { noted.rate });
        }
        self.note_scrub().await?;
        self.run_scrub();
        Ok(self.scrub_status())
    }

    /// Stops a scrub where it is.
    pub async fn scrub_stop(&self) -> Result<ScrubStatus, PoolError> {
        let _turn = self.scrub.turn.acquire(1).await;
        if self.halt_scrub().await {
            self.note_scrub().await?;
        }
        Ok(self.scrub_status())
    }

    async fn halt_scrub(&self) -> bool {
        let Some(progress) = self.scrub.progress.borrow_mut().take() else {
            // One that ended early would be taken up by the next opening.
            return std::mem::replace(&mut self.scrub.noted.borrow_mut().running, false);
        };
        progress.stop.store(true, Ordering::Relaxed);
        while progress.running.load(Ordering::Relaxed) > 0 && !self.closed.get() {
            crate::reactor::sleep(Duration::from_millis(1)).await;
        }
        self.take_over(&progress);
        self.scrub.noted.borrow_mut().running = false;
        true
    }

    /// How the scrub stands.
    pub fn scrub_status(&self) -> ScrubStatus {
        if let Some(progress) = self.scrub.progress.borrow().as_ref() {
            self.take_over(progress);
        }
        let noted = self.scrub.noted.borrow();
        let running = self.scrub.progress.borrow().is_some();
        let (at, bytes) = *self.scrub.begun.borrow();
        let (seconds, read) = (unix_now().saturating_sub(at), noted.done.saturating_sub(bytes));
        let left = noted.total.saturating_sub(noted.done);
        let started = !noted.places.is_empty();
        ScrubStatus {
            state: match (running, started) {
                (true, _) => "running",
                (false, true) => "stopped",
                (false, false) => "idle",
            },
            rate: noted.rate,
            started: started.then_some(noted.started),
            bytes_total: noted.total,
            bytes_done: noted.done,
            errors: noted.errors,
            healed: noted.healed,
            eta_seconds: (running && read > 0)
                .then(|| (left as f64 * seconds.max(1) as f64 / read as f64) as u64),
            last_completed: noted.last.clone(),
        }
    }

    /// Everything damaged, with where it is in which volumes and snapshots.
    pub async fn damage_list(&self) -> Result<Vec<DamageInfo>, PoolError> {
        let names = Arc::new(Names::of(&self.records.borrow(), self.geometry.shards));
        let lists = self.owners.each(move |shard| async move { shard.damage_infos(&names).await }).await?;
        Ok(lists.into_iter().flatten().collect())
    }

    /// Forgets all damage found so far. What is still damaged will be found again.
    pub async fn damage_clear(&self) -> Result<(), PoolError> {
        self.damage.borrow_mut().clear();
        self.owners.each(|shard| async move { shard.damage.borrow_mut().clear() }).await?;
        Ok(())
    }

    fn take_over(&self, progress: &Progress) {
        let mut noted = self.scrub.noted.borrow_mut();
        noted.done = progress.bytes.load(Ordering::Relaxed);
        noted.errors = progress.errors.load(Ordering::Relaxed);
        noted.healed = progress.healed.load(Ordering::Relaxed);
        let place =
            |place: &ShardPlace| (place.node.load(Ordering::Relaxed), place.leaf.load(Ordering::Relaxed));
        noted.places = progress.places.iter().map(place).collect();
    }

    async fn note_scrub(&self) -> Result<(), PoolError> {
        let value = serde_json::to_vec(&*self.scrub.noted.borrow()).unwrap_or_default();
        let mut transaction = Transaction::new();
        transaction.put(KEY, value);
        self.commit_transaction(transaction).await
    }

    fn run_scrub(self: &Rc<Self>) {
        let progress = {
            let noted = self.scrub.noted.borrow();
            let mut places = noted.places.clone();
            places.resize(usize::from(self.geometry.shards), (0, 0));
            *self.scrub.begun.borrow_mut() = (unix_now(), noted.done);
            Arc::new(Progress {
                stop: AtomicBool::new(false),
                rate: AtomicU64::new(noted.rate),
                bytes: AtomicU64::new(noted.done),
                errors: AtomicU64::new(noted.errors),
                healed: AtomicU64::new(noted.healed),
                running: AtomicU32::new(u32::from(self.geometry.shards)),
                places: places
                    .into_iter()
                    .map(|(node, leaf)| ShardPlace { node: node.into(), leaf: leaf.into() })
                    .collect(),
            })
        };
        *self.scrub.progress.borrow_mut() = Some(Arc::clone(&progress));
        let key = self.owners.key;
        crate::reactor::spawn(follow(key, progress));
    }

    /// What lies at fixed places, both copies: labels, the half of the catalog in use, root slots.
    fn fixed_bytes(&self) -> u64 {
        let geometry = self.geometry;
        let labels = 2 * self.devices.len() as u64;
        (labels + 2 * u64::from(geometry.catalog_blocks) + 4 * u64::from(geometry.shards)) * BLOCK
    }

    /// The fixed places, which no shard sweeps. Returns blocks lost and copies written again.
    async fn scrub_fixed(&self) -> Result<(u64, u64), PoolError> {
        let found = {
            let _alone = self.checks.acquire(1).await;
            self.check_fixed(true).await?
        };
        Ok(tally(&found, |what| {
            let mut damage = self.damage.borrow_mut();
            if damage.len() < 1000 && !damage.contains(&what) {
                damage.push(what);
            }
        }))
    }

    async fn end_scrub(&self, progress: &Progress) -> Result<(), PoolError> {
        self.take_over(progress);
        let started = {
            let mut noted = self.scrub.noted.borrow_mut();
            let now = unix_now();
            noted.last = Some(ScrubEnd {
                at: now,
                seconds: now.saturating_sub(noted.started),
                bytes: noted.done,
                errors: noted.errors,
                healed: noted.healed,
            });
            noted.running = false;
            noted.places.clear();
            noted.started
        };
        // The date may have been set back since; what was met in this process was met after it took the scrub up.
        let since = started.min(self.scrub.begun.borrow().0);
        let forget = move |shard: Rc<Shard>| async move { shard.damage.borrow_mut().forget_unseen(since) };
        self.owners.each(forget).await?;
        self.note_scrub().await
    }
}

/// Counts findings as (lost, healed), and tells the texts of those worth telling.
fn tally(found: &Findings, mut tell: impl FnMut(String)) -> (u64, u64) {
    let (mut lost, mut healed) = (0, 0);
    for finding in found.list.iter().filter(|finding| finding.severity != Severity::Note) {
        match finding.repaired {
            true => healed += 1,
            false => lost += 1,
        }
        let done = if finding.repaired { "; it was written again" } else { "" };
        tell(format!("{}{done}", finding.what));
    }
    (lost, healed)
}

/// Starts the shards and sees to it that what they did is noted.
async fn follow(key: usize, progress: Arc<Progress>) {
    let fresh = progress.bytes.load(Ordering::Relaxed) == 0;
    {
        let Some(home) = super::lifecycle::home(key) else { return };
        if let Ok((lost, healed)) = home.scrub_fixed().await {
            progress.errors.fetch_add(lost, Ordering::Relaxed);
            progress.healed.fetch_add(healed, Ordering::Relaxed);
        }
        if fresh {
            progress.bytes.fetch_add(home.fixed_bytes(), Ordering::Relaxed);
        }
        let owners = Arc::clone(&home.owners);
        let progress = Arc::clone(&progress);
        crate::reactor::spawn(async move {
            let shared = Arc::clone(&progress);
            let run = move |shard: Rc<Shard>| async move {
                let ended = shard.scrub(&shared).await;
                if let Err(error) = &ended {
                    tracing::warn!(pool = %shard.pool, shard = shard.index, "the scrub ended early: {error}");
                    shared.stop.store(true, Ordering::Relaxed);
                }
                shared.running.fetch_sub(1, Ordering::Relaxed);
            };
            if owners.each(run).await.is_err() {
                progress.stop.store(true, Ordering::Relaxed);
                progress.running.store(0, Ordering::Relaxed);
            }
        });
    }
    let mut noted = crate::reactor::now();
    loop {
        crate::reactor::sleep(LOOK_EVERY.min(NAP)).await;
        let Some(home) = super::lifecycle::home(key).filter(|home| !home.closed.get()) else {
            progress.stop.store(true, Ordering::Relaxed);
            return;
        };
        let ours = home.scrub.progress.borrow().as_ref().is_some_and(|other| Arc::ptr_eq(other, &progress));
        if !ours {
            return;
        }
        if progress.running.load(Ordering::Relaxed) == 0 {
            home.scrub.progress.borrow_mut().take();
            let noted = match progress.stop.load(Ordering::Relaxed) {
                true => {
                    // A shard could not go on: the next opening takes it up, so it stays noted as running.
                    home.take_over(&progress);
                    home.note_scrub().await
                }
                false => home.end_scrub(&progress).await,
            };
            if let Err(error) = noted {
                tracing::warn!("the end of a scrub was not noted: {error}");
            }
            return;
        }
        if crate::reactor::now() - noted >= NOTE_EVERY {
            noted = crate::reactor::now();
            home.take_over(&progress);
            if let Err(error) = home.note_scrub().await {
                tracing::warn!("the scrub's progress was not noted: {error}");
            }
        }
    }
}

impl Shard {
    /// Sweeps from where the shard's place is to the end.
    async fn scrub(self: &Rc<Self>, progress: &Progress) -> Result<(), IoError> {
        let place = &progress.places[usize::from(self.index)];
        let mut pace = Pace { due: crate::reactor::now(), progress, shards: u64::from(self.geometry.shards) };
        if (place.node.load(Ordering::Relaxed), place.leaf.load(Ordering::Relaxed)) == (0, 0) {
            self.scrub_records(&mut pace).await?;
            place.node.store(1, Ordering::Relaxed);
        }
        while let Some(node) = self.next_own(NodeId(place.node.load(Ordering::Relaxed))) {
            if node.0 != place.node.load(Ordering::Relaxed) {
                place.node.store(node.0, Ordering::Relaxed);
                place.leaf.store(0, Ordering::Relaxed);
            }
            while place.leaf.load(Ordering::Relaxed) < LEAVES_MAX {
                if progress.stop.load(Ordering::Relaxed) {
                    return Ok(());
                }
                let step = self.sweep(node, place.leaf.load(Ordering::Relaxed), true).await?;
                progress.errors.fetch_add(step.lost, Ordering::Relaxed);
                progress.healed.fetch_add(step.healed, Ordering::Relaxed);
                pace.keep((step.metadata + step.data) * BLOCK).await;
                place.leaf.store(step.next, Ordering::Relaxed);
            }
            place.leaf.store(0, Ordering::Relaxed);
            place.node.store(node.0.saturating_add(1), Ordering::Relaxed);
        }
        Ok(())
    }

    /// Node records, bitmaps, the root and the journal, as of a commit.
    async fn scrub_records(self: &Rc<Self>, pace: &mut Pace<'_>) -> Result<(), IoError> {
        let (root, generation) = self.pin().await?;
        let known = {
            let state = self.state.borrow();
            let lineage = |id: NodeId| {
                state.nodes.lineage(id).unwrap_or(Lineage { parent: None, sealed: None, ghost: false })
            };
            Known {
                regions: state.space.regions().collect(),
                nodes: state.nodes.iter().map(|id| (id, lineage(id))).collect(),
                volumes: Vec::new(),
            }
        };
        let names = Names::default();
        let photograph: Result<(Proof<'_>, Picture), Broken> =
            Proof::photograph(self, &names, root, &known, true, false).await;
        self.unpin(generation);
        // When writes wait for the blocks kept, the records wait for the next scrub.
        let Ok((proof, picture)) = photograph else { return self.check() };
        let readable = proof.nodes_known && picture.regions.values().all(|region| region.known);
        let mut findings = proof.findings.clone();
        let blocks = proof.tally.metadata;
        drop((proof, picture));
        if !readable && self.mend(&[super::prove::Mend::Rewrite]).await.is_ok() {
            for finding in &mut findings.list {
                finding.repaired |= matches!(finding.kind, Kind::Nodes | Kind::Bitmap);
            }
        }
        {
            let _idle = self.commit_lock.acquire(1).await;
            findings.extend(self.check_roots(true).await.1);
        }
        let journal = self.check_live_journal().await;
        if !journal.is_empty() && self.commit().await.is_ok() {
            findings.extend(journal);
            findings.list.iter_mut().for_each(|finding| finding.repaired |= finding.kind == Kind::Journal);
        }
        for finding in findings.list.iter().filter(|finding| finding.severity != Severity::Note) {
            let Some(place) = &finding.place else { continue };
            let state = if finding.repaired { DamageState::Healed } else { DamageState::Degraded };
            self.damaged_at(finding.kind, state, place.clone(), finding.what.clone());
        }
        let (lost, healed) = tally(&findings, |_| {});
        pace.progress.errors.fetch_add(lost, Ordering::Relaxed);
        pace.progress.healed.fetch_add(healed, Ordering::Relaxed);
        pace.keep(blocks * BLOCK).await;
        Ok(())
    }
}

/// Keeps a shard to its share of the rate.
struct Pace<'a> {
    due: std::time::Instant,
    progress: &'a Progress,
    shards: u64,
}

impl Pace<'_> {
    /// So many bytes were read: waits until that is allowed for, and lets others run in any case.
    async fn keep(&mut self, bytes: u64) {
        self.progress.bytes.fetch_add(bytes, Ordering::Relaxed);
        let share = (self.progress.rate.load(Ordering::Relaxed) / self.shards).max(1);
        let now = crate::reactor::now();
        self.due = self.due.max(now) + Duration::from_secs_f64(bytes as f64 / share as f64);
        crate::reactor::yield_now().await;
        while crate::reactor::now() < self.due && !self.progress.stop.load(Ordering::Relaxed) {
            let left = self.due - crate::reactor::now();
            crate::reactor::sleep(left.min(NAP)).await;
        }
    }
}
