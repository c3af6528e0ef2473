//! The pools of this process, as the control thread sees them: create, import, export, destroy, and a handle
//! ([`Pool`]) whose calls run on the pool's home reactor.
#![forbid(unsafe_code)]

use std::future::Future;
use std::rc::Rc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use uuid::Uuid;

use super::check::CheckOptions;
use super::damage::DamageInfo;
use super::diff::DiffPart;
use super::error::{PoolError, PoolErrorKind};
use super::event::EventSink;
use super::finding::{CheckReport, Severity};
use super::home::{Home, check_name};
use super::info::{NodeInfo, PoolInfo, RollbackInfo, VolumeSpec};
use super::lifecycle::{
    Setting, at_home, choose_geometry, close, create, home, open, read_label, read_labels,
};
use super::local::Owners;
use super::pointer::BLOCK_BYTES;
use super::receive::{Identity, ReceiveSpec};
use super::scrub::ScrubStatus;
use super::volume::Volume;
use crate::device::Device;
use crate::memory::DmaBuf;
use crate::reactor::{ReactorHandle, new_uuid};

const BLOCK: u64 = BLOCK_BYTES as u64;

/// The smallest page cache of a shard, in pages.
const PAGES_MIN: usize = 256;

static NEXT_KEY: AtomicUsize = AtomicUsize::new(0);

/// Choices made when a pool is created.
#[derive(Debug, Clone, Default)]
pub struct PoolOptions {
    /// Shards; 8 when absent. The most cores that one pool can use.
    pub shards: Option<u16>,
    /// Bytes of a region, a power of two from 1 to 64 MiB; chosen by the pool's size when absent.
    pub region_bytes: Option<u64>,
    /// Create even where a pool is already.
    pub force: bool,
}

/// The open pools.
pub struct PoolManager {
    reactors: Vec<ReactorHandle>,
    cache_bytes: u64,
    events: Option<EventSink>,
    pools: Mutex<Vec<Arc<Pool>>>,
}

/// An open pool. Calls run on its home reactor and may be made from any thread.
pub struct Pool {
    name: String,
    uuid: Uuid,
    key: usize,
    home: Option<ReactorHandle>,
    owners: Arc<Owners>,
}

impl PoolManager {
    /// For pools whose shards are dealt over `reactors` and whose pages take up to `cache_bytes` of memory. Without
    /// reactors everything runs on the calling thread's executor.
    pub fn new(reactors: Vec<ReactorHandle>, cache_bytes: u64) -> PoolManager {
        PoolManager { reactors, cache_bytes, events: None, pools: Mutex::default() }
    }

    /// The same, telling `events` what happens to the pools opened from now on.
    pub fn with_events(mut self, events: EventSink) -> PoolManager {
        self.events = Some(events);
        self
    }

    /// The open pools, in the order in which they were opened.
    pub fn list(&self) -> Vec<Arc<Pool>> {
        self.pools.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The open pool with this name or UUID.
    pub fn get(&self, name: &str) -> Result<Arc<Pool>, PoolError> {
        let pools = self.list();
        let uuid = Uuid::parse_str(name).ok();
        let found = pools.iter().find(|pool| pool.name == name || Some(pool.uuid) == uuid).cloned();
        found.ok_or_else(|| {
            let open: Vec<&str> = pools.iter().map(|pool| pool.name.as_str()).collect();
            PoolError::not_found(match open.as_slice() {
                [] => format!("there is no pool '{name}': no pool is open (create or import one)"),
                open => format!("there is no pool '{name}'; open pools: {}", open.join(", ")),
            })
        })
    }

    fn owners(&self, devices: Vec<Device>, shards: u16) -> (Option<ReactorHandle>, Arc<Owners>) {
        let reactor = |shard: u16| match self.reactors.len() {
            0 => None,
            count => self.reactors.get(usize::from(shard) % count).cloned(),
        };
        let owners = Owners {
            key: NEXT_KEY.fetch_add(1, Ordering::Relaxed),
            reactors: (0..shards).map(reactor).collect(),
            devices,
        };
        (reactor(0), Arc::new(owners))
    }

    fn setting(&self, owners: Arc<Owners>, reactor: Option<ReactorHandle>, shards: u16) -> Setting {
        Setting { owners, reactor, page_limit: self.page_limit(shards), events: self.events.clone() }
    }

    fn page_limit(&self, shards: u16) -> usize {
        ((self.cache_bytes / BLOCK / u64::from(shards)) as usize).max(PAGES_MIN)
    }

    /// Creates a pool on devices that hold none.
    pub async fn create(
        &self,
        name: &str,
        devices: Vec<Device>,
        options: PoolOptions,
    ) -> Result<Arc<Pool>, PoolError> {
        check_name("pool", name)?;
        if self.list().iter().any(|pool| pool.name == name) {
            return Err(PoolError::exists(format!("there is a pool named '{name}' already")));
        }
        let shards = options.shards.unwrap_or(8);
        let geometry = choose_geometry(&devices, shards, options.region_bytes)?;
        self.check_unused(&devices)?;
        let (reactor, owners) = self.owners(devices, shards);
        let pool =
            Pool { name: name.to_owned(), uuid: new_uuid(), key: owners.key, home: reactor.clone(), owners };
        let setting = self.setting(Arc::clone(&pool.owners), reactor, shards);
        let (name, uuid, force) = (name.to_owned(), pool.uuid, options.force);
        at_home(pool.home.clone(), move || async move { create(name, uuid, geometry, setting, force).await })
            .await??;
        Ok(self.add(pool))
    }

    /// Opens the pool that these devices, in any order, make up.
    pub async fn import(&self, devices: Vec<Device>) -> Result<Arc<Pool>, PoolError> {
        self.check_unused(&devices)?;
        let reactor = self.reactors.first().cloned();
        let read = devices.clone();
        let (labels, notes) = at_home(reactor, move || async move { read_labels(&read).await }).await??;
        let label = labels.first().cloned().ok_or_else(|| PoolError::invalid("no device is given"))?;
        let mut in_order = Vec::new();
        for uuid in &label.devices {
            let mut of_vdev = labels.iter().zip(&devices).filter(|(label, _)| label.device == *uuid);
            let Some((_, device)) = of_vdev.next() else {
                return Err(PoolError::not_found(format!(
                    "pool '{}' has {} devices; the one with UUID {uuid} is not among those given",
                    label.name,
                    label.devices.len()
                )));
            };
            if let Some((_, copy)) = of_vdev.next() {
                return Err(PoolError::invalid(format!(
                    "{} and {} are copies of one device of pool '{}': give only one of them",
                    device.info().uri,
                    copy.info().uri,
                    label.name
                )));
            }
            in_order.push(device.clone());
        }
        if self.list().iter().any(|pool| pool.uuid == label.pool) {
            return Err(PoolError::exists(format!("pool '{}' is open already", label.name)));
        }
        let shards = label.geometry.shards;
        let (reactor, owners) = self.owners(in_order, shards);
        let setting = self.setting(Arc::clone(&owners), reactor.clone(), shards);
        let name = at_home(reactor.clone(), move || async move {
            open(label, setting, notes).await.map(|name| (name, labels[0].pool))
        })
        .await??;
        let (name, uuid) = name;
        if self.list().iter().any(|pool| pool.name == name) {
            close(reactor, owners.clone()).await?;
            return Err(PoolError::exists(format!("another pool named '{name}' is open: export it first")));
        }
        Ok(self.add(Pool { name, uuid, key: owners.key, home: reactor, owners }))
    }

    fn add(&self, pool: Pool) -> Arc<Pool> {
        let pool = Arc::new(pool);
        self.pools.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::clone(&pool));
        pool
    }

    fn check_unused(&self, devices: &[Device]) -> Result<(), PoolError> {
        for pool in self.list() {
            for device in devices {
                if pool.owners.devices.iter().any(|used| used.info().uuid == device.info().uuid) {
                    return Err(PoolError::busy(format!(
                        "{} belongs to pool '{}'",
                        device.info().uri,
                        pool.name
                    )));
                }
            }
        }
        Ok(())
    }

    /// Closes a pool cleanly. Its devices can then be imported elsewhere. Refused while something of it is exported.
    pub async fn export(&self, name: &str) -> Result<(), PoolError> {
        let pool = self.get(name)?;
        let open = pool.run(|home| async move { Ok(home.open_names()) }).await?;
        if !open.is_empty() {
            return Err(PoolError::busy(format!(
                "pool '{name}' is in use: unexport {} first",
                open.join(", ")
            )));
        }
        self.shut(&pool).await
    }

    /// Closes a pool whatever uses it: further I/O on it fails.
    pub async fn shut(&self, pool: &Arc<Pool>) -> Result<(), PoolError> {
        self.pools.lock().unwrap_or_else(PoisonError::into_inner).retain(|open| open.key != pool.key);
        close(pool.home.clone(), Arc::clone(&pool.owners)).await
    }

    /// Closes a pool and makes its devices forget it.
    pub async fn destroy(&self, name: &str) -> Result<(), PoolError> {
        let pool = self.get(name)?;
        if let Some((name, by)) = pool.run(|home| async move { Ok(home.first_pin()) }).await? {
            return Err(PoolError::busy(format!("'{name}' is pinned by '{by}': unpin it first")));
        }
        self.export(name).await?;
        let owners = Arc::clone(&pool.owners);
        at_home(pool.home.clone(), move || async move {
            for device in &owners.devices {
                let last = device.info().size / BLOCK - 1;
                let (_, label) = read_label(device).await?;
                let places = [Some(0), Some(last), label.map(|label| label.geometry.last_block())];
                for block in places.into_iter().flatten() {
                    device.write(block * BLOCK, DmaBuf::zeroed(BLOCK_BYTES).freeze()).await?;
                }
                device.flush().await?;
            }
            Ok::<(), PoolError>(())
        })
        .await?
    }
}

impl Pool {
    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its identity.
    pub fn uuid(&self) -> Uuid {
        self.uuid
    }

    #[cfg(test)]
    pub(super) fn key(&self) -> usize {
        self.key
    }

    /// Nodes that the catalog and the shards still have a record of, on pools without reactors.
    #[cfg(test)]
    pub(super) fn records_left(&self) -> usize {
        let shards = (0..self.owners.reactors.len() as u16).filter_map(|i| super::local::shard(self.key, i));
        let slots: usize = shards.map(|shard| shard.state.borrow().nodes.records()).sum();
        slots + home(self.key).map_or(0, |home| home.records.borrow().nodes().count())
    }

    async fn run<T, F, Fut>(&self, work: F) -> Result<T, PoolError>
    where
        T: Send + 'static,
        F: FnOnce(Rc<Home>) -> Fut + Send + 'static,
        Fut: Future<Output = Result<T, PoolError>> + 'static,
    {
        let (key, name) = (self.key, self.name.clone());
        at_home(self.home.clone(), move || async move {
            match home(key) {
                Some(home) => work(home).await,
                None => Err(PoolError::not_found(format!("pool '{name}' is no longer open"))),
            }
        })
        .await?
    }

    /// Returns when the operation under way, if any, has ended.
    pub async fn settle(&self) -> Result<(), PoolError> {
        self.run(|home| async move {
            let _turn = home.operations.acquire(1).await;
            Ok(())
        })
        .await
    }

    /// What the pool is and how full.
    pub async fn info(&self) -> Result<PoolInfo, PoolError> {
        self.run(|home| async move { home.info().await }).await
    }

    /// All volumes and snapshots.
    pub async fn nodes(&self) -> Result<Vec<NodeInfo>, PoolError> {
        self.run(|home| async move { home.nodes().await }).await
    }

    /// One volume or snapshot, by name or UUID, at a cost that does not depend on its size: without `unique` of a
    /// snapshot.
    pub async fn find(&self, name: &str) -> Result<NodeInfo, PoolError> {
        let name = name.to_owned();
        self.run(|home| async move { home.brief(&name).await }).await
    }

    /// One volume or snapshot, by name or UUID.
    pub async fn node(&self, name: &str) -> Result<NodeInfo, PoolError> {
        let name = name.to_owned();
        self.run(|home| async move { home.node(&name).await }).await
    }

    /// Creates a thin volume.
    pub async fn volume_create(&self, spec: VolumeSpec) -> Result<NodeInfo, PoolError> {
        self.run(|home| async move { home.volume_create(spec).await }).await
    }

    /// Makes the present state of a volume a snapshot.
    pub async fn snapshot_create(&self, volume: &str, name: &str) -> Result<NodeInfo, PoolError> {
        let wanted = [(volume.to_owned(), name.to_owned())];
        let infos = self.run(|home| async move { home.snapshot_create(&wanted).await }).await?;
        infos.into_iter().next().ok_or_else(|| PoolError::new(PoolErrorKind::Failed, "no snapshot was made"))
    }

    /// Makes the present state of several volumes, as one instant, their snapshots: pairs of (volume, name).
    pub async fn snapshot_group(&self, wanted: Vec<(String, String)>) -> Result<Vec<NodeInfo>, PoolError> {
        self.run(|home| async move { home.snapshot_create(&wanted).await }).await
    }

    /// Creates a volume that starts as a snapshot is.
    pub async fn clone_create(&self, snapshot: &str, name: &str) -> Result<NodeInfo, PoolError> {
        let (snapshot, name) = (snapshot.to_owned(), name.to_owned());
        self.run(|home| async move { home.clone_create(&snapshot, &name).await }).await
    }

    /// Lets a volume be as a snapshot is; what it held becomes the snapshot `keep`, or is deleted.
    pub async fn rollback(
        &self,
        volume: &str,
        snapshot: &str,
        keep: Option<String>,
    ) -> Result<RollbackInfo, PoolError> {
        let (volume, snapshot) = (volume.to_owned(), snapshot.to_owned());
        self.run(|home| async move { home.rollback(&volume, &snapshot, keep).await }).await
    }

    /// Whether a volume grew from a snapshot, or the snapshot was taken of it.
    pub async fn is_of(&self, volume: &str, snapshot: &str) -> Result<bool, PoolError> {
        let (volume, snapshot) = (volume.to_owned(), snapshot.to_owned());
        self.run(|home| async move { home.is_of(&volume, &snapshot) }).await
    }

    /// How long the last snapshot or rollback since the pool was opened kept its volumes from starting writes.
    pub async fn last_fence(&self) -> Result<Option<Duration>, PoolError> {
        self.run(|home| async move { Ok(home.last_fence.get()) }).await
    }

    /// Deletes a volume or a snapshot.
    pub async fn delete(&self, name: &str) -> Result<(), PoolError> {
        let name = name.to_owned();
        self.run(|home| async move { home.delete(&name).await }).await
    }

    /// Changes a volume's size.
    pub async fn resize(&self, name: &str, size: u64, allow_shrink: bool) -> Result<NodeInfo, PoolError> {
        let name = name.to_owned();
        self.run(move |home| async move { home.resize(&name, size, allow_shrink).await }).await
    }

    /// Gives a volume or a snapshot another name.
    pub async fn rename(&self, name: &str, new: &str) -> Result<NodeInfo, PoolError> {
        let (name, new) = (name.to_owned(), new.to_owned());
        self.run(|home| async move { home.rename(&name, &new).await }).await
    }

    /// Sees to it that a volume or snapshot cannot be deleted until `by` unpins it.
    pub async fn pin(&self, name: &str, by: &str, reason: Option<String>) -> Result<NodeInfo, PoolError> {
        let (name, by) = (name.to_owned(), by.to_owned());
        self.run(|home| async move { home.pin(&name, &by, reason).await }).await
    }

    /// Takes the pin of `by` away, if there is one.
    pub async fn unpin(&self, name: &str, by: &str) -> Result<NodeInfo, PoolError> {
        let (name, by) = (name.to_owned(), by.to_owned());
        self.run(|home| async move { home.unpin(&name, &by).await }).await
    }

    /// Makes a clone the main line: the snapshots it shares with the volume it was made from become its own.
    pub async fn promote(&self, clone: &str) -> Result<NodeInfo, PoolError> {
        let clone = clone.to_owned();
        self.run(|home| async move { home.promote(&clone).await }).await
    }

    /// Ranges of `node` that differ from `base`, or all that hold data where there is no base, from byte `offset` on
    /// (a multiple of 4096): up to `ranges_max`, and where to go on.
    pub async fn diff_part(
        &self,
        base: Option<&str>,
        node: &str,
        offset: u64,
        ranges_max: usize,
    ) -> Result<DiffPart, PoolError> {
        let (base, node) = (base.map(str::to_owned), node.to_owned());
        self.run(move |home| async move { home.diff_part(base.as_deref(), &node, offset, ranges_max).await })
            .await
    }

    /// Begins to receive a snapshot from elsewhere, into the volume [`receiving_name`](super::receiving_name).
    pub async fn receive_begin(&self, spec: ReceiveSpec) -> Result<(), PoolError> {
        self.run(move |home| async move { home.receive_begin(spec).await }).await
    }

    /// Makes what was received the snapshot `name`, in one step.
    pub async fn receive_end(
        &self,
        session: Uuid,
        name: &str,
        identity: Identity,
    ) -> Result<NodeInfo, PoolError> {
        let name = name.to_owned();
        self.run(move |home| async move { home.receive_end(session, &name, identity).await }).await
    }

    /// Gives up what was received so far; there need not be anything.
    pub async fn receive_abandon(&self, session: Uuid) -> Result<(), PoolError> {
        self.run(move |home| async move { home.receive_abandon(session).await }).await
    }

    /// The sessions that have received something and have not ended.
    pub async fn receiving(&self) -> Result<Vec<Uuid>, PoolError> {
        self.run(|home| async move { Ok(home.receiving()) }).await
    }

    /// A handle to read and write a volume, or to read a snapshot.
    pub async fn open(&self, name: &str) -> Result<Volume, PoolError> {
        let name = name.to_owned();
        self.run(|home| async move { home.open(&name) }).await
    }

    /// Keeps a value in the pool's catalog; `None` removes it.
    pub async fn config_put(&self, key: &str, value: Option<serde_json::Value>) -> Result<(), PoolError> {
        let key = key.to_owned();
        self.run(|home| async move { home.config_put(&key, value).await }).await
    }

    /// The kept values whose keys start with `prefix`.
    pub async fn config_list(&self, prefix: &str) -> Result<Vec<(String, serde_json::Value)>, PoolError> {
        let prefix = prefix.to_owned();
        self.run(|home| async move {
            let records = home.records.borrow();
            let wanted = records.config().iter().filter(|(key, _)| key.starts_with(&prefix));
            Ok(wanted.map(|(key, value)| (key.clone(), value.clone())).collect())
        })
        .await
    }

    /// What is wrong with the pool, and on demand its repair, while it is in use.
    pub async fn check(&self, options: CheckOptions) -> Result<CheckReport, PoolError> {
        self.run(move |home| async move { home.examine(options).await }).await
    }

    /// What a check finds wrong, in words; what a crash leaves behind as a matter of course is not.
    pub async fn verify(&self) -> Result<Vec<String>, PoolError> {
        let report = self.check(CheckOptions::default()).await?;
        let wrong = report.findings.into_iter().filter(|finding| finding.severity > Severity::Note);
        Ok(wrong.map(|finding| finding.what).collect())
    }

    /// Everything found damaged since the import, with where it is in which volumes and snapshots.
    pub async fn damage(&self) -> Result<Vec<DamageInfo>, PoolError> {
        self.run(|home| async move { home.damage_list().await }).await
    }

    /// Forgets the damage found so far.
    pub async fn damage_clear(&self) -> Result<(), PoolError> {
        self.run(|home| async move { home.damage_clear().await }).await
    }

    /// Starts to read everything in the background, at most `rate` bytes a second; lets a stopped scrub go on, unless
    /// it shall begin anew.
    pub async fn scrub_start(&self, rate: Option<u64>, anew: bool) -> Result<ScrubStatus, PoolError> {
        self.run(move |home| async move { home.scrub_start(rate, anew).await }).await
    }

    /// Stops the scrub where it is.
    pub async fn scrub_stop(&self) -> Result<ScrubStatus, PoolError> {
        self.run(|home| async move { home.scrub_stop().await }).await
    }

    /// How the scrub stands.
    pub async fn scrub_status(&self) -> Result<ScrubStatus, PoolError> {
        self.run(|home| async move { Ok(home.scrub_status()) }).await
    }
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pool").field("name", &self.name).field("uuid", &self.uuid).finish()
    }
}
