//! How a pool is created on devices, opened from them, and closed.
//!
//! Creating writes the labels last: until then nothing leads to what is half made. Opening reads labels, catalog, and
//! each shard's root and journal; it ends with a new epoch, so that whatever was written before lies before it.
#![forbid(unsafe_code)]

use std::cell::RefCell;
use std::collections::HashMap;
use std::future::Future;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use uuid::Uuid;

use super::catalog::{Catalog, Map};
use super::error::{PoolError, PoolErrorKind};
use super::event::EventSink;
use super::home::Home;
use super::label::{DEVICE_BYTES_MIN, Geometry, Label, LabelError, REGIONS_MAX, SHARDS_MAX, VDEVS_MAX};
use super::local::{self, Owners};
use super::node::{Lineage, NodeId};
use super::pointer::BLOCK_BYTES;
use super::records::{Changes, Records};
use super::recover::{Known, Place};
use super::shard::{Answer, Regions, Shard};
use super::space::{Ask, RegionId, RegionKind, Use};
use crate::device::{Device, IoError};
use crate::memory::DmaBuf;
use crate::reactor::{ReactorHandle, new_uuid, unix_now};

const BLOCK: u64 = BLOCK_BYTES as u64;

thread_local! {
    static HOMES: RefCell<HashMap<usize, Rc<Home>>> = RefCell::default();
}

/// The home of a pool, on its home reactor.
pub(super) fn home(key: usize) -> Option<Rc<Home>> {
    HOMES.with_borrow(|homes| homes.get(&key).cloned())
}

/// Forgets all pools at home on this thread.
pub(super) fn forget_all() {
    drop(HOMES.take());
}

/// A shard's link to its pool.
struct Link {
    key: usize,
    home: Option<ReactorHandle>,
}

impl Regions for Link {
    fn grant(&self, shard: u16, what: Use, ask: Ask) -> Answer<Vec<(RegionId, RegionKind)>> {
        let key = self.key;
        let granted = at_home(self.home.clone(), move || async move {
            match home(key) {
                Some(home) => home.grant(shard, what, ask).await,
                None => Vec::new(),
            }
        });
        Box::pin(async move { granted.await.unwrap_or_default() })
    }

    fn give_back(&self, shard: u16, regions: Vec<RegionId>) -> Answer<()> {
        let key = self.key;
        let done = at_home(self.home.clone(), move || async move {
            if let Some(home) = home(key) {
                home.give_back(shard, regions).await;
            }
        });
        Box::pin(async move { drop(done.await) })
    }
}

/// Runs `work` on the home reactor, to its end even when the caller goes away; right here when there is none.
pub(super) async fn at_home<T, F, Fut>(home: Option<ReactorHandle>, work: F) -> Result<T, IoError>
where
    T: Send + 'static,
    F: FnOnce() -> Fut + Send + 'static,
    Fut: Future<Output = T> + 'static,
{
    match home {
        Some(reactor) => reactor.call(work).await.map_err(|_| IoError::Gone),
        None => Ok(work().await),
    }
}

pub(super) fn choose_geometry(
    devices: &[Device],
    shards: u16,
    region_bytes: Option<u64>,
) -> Result<Geometry, PoolError> {
    if devices.is_empty() || devices.len() > VDEVS_MAX {
        return Err(PoolError::invalid(format!("a pool needs 1 to {VDEVS_MAX} devices")));
    }
    for (i, device) in devices.iter().enumerate() {
        if devices[..i].iter().any(|other| other.info().uuid == device.info().uuid) {
            return Err(PoolError::invalid(format!("{} is given twice", device.info().uri)));
        }
        if device.info().size < DEVICE_BYTES_MIN {
            return Err(PoolError::invalid(format!(
                "{} has {} bytes; a pool's device needs at least {DEVICE_BYTES_MIN} (64 MiB)",
                device.info().uri,
                device.info().size
            )));
        }
    }
    if !(1..=SHARDS_MAX).contains(&shards) {
        return Err(PoolError::invalid(format!("{shards} shards: 1 to {SHARDS_MAX} are possible")));
    }
    if let Some(bytes) = region_bytes
        && !(bytes.is_power_of_two() && (1 << 20..=64 << 20).contains(&bytes))
    {
        return Err(PoolError::invalid("the region size must be a power of two from 1 MiB to 64 MiB"));
    }
    let smallest = devices.iter().map(|device| device.info().size).min().unwrap_or(0) / BLOCK * BLOCK;
    let geometry =
        Geometry::choose(smallest, smallest.saturating_mul(devices.len() as u64), shards, region_bytes);
    if geometry.regions() > REGIONS_MAX {
        return Err(PoolError::invalid(format!(
            "devices of {smallest} bytes have more than {REGIONS_MAX} regions of {} bytes: use larger regions",
            geometry.region_bytes()
        )));
    }
    let needed = 3 * u64::from(shards) + 4;
    if u64::from(geometry.regions()) * (devices.len() as u64) < needed {
        return Err(PoolError::invalid(format!(
            "the devices have too little room for {shards} shards: use larger devices or fewer shards"
        )));
    }
    Ok(geometry)
}

/// Both labels of a device: notes on damage, and the label if one is whole.
pub(super) async fn read_label(device: &Device) -> Result<(Vec<String>, Option<Label>), PoolError> {
    let mut notes = Vec::new();
    let mut found: Option<Label> = None;
    let last = device.info().size / BLOCK - 1;
    let mut places = vec![0, last];
    let mut at = 0;
    let mut bad: Vec<(u64, LabelError)> = Vec::new();
    while let Some(block) = places.get(at).copied() {
        let bytes = super::copy::read(device, block * BLOCK, BLOCK_BYTES).await;
        match Label::decode(&bytes) {
            Ok(label) => {
                // The device may have grown since: the second label is where it was then.
                let second = label.geometry.last_block();
                if !places.contains(&second) && second < last {
                    places.push(second);
                }
                found.get_or_insert(label);
            }
            Err(error) => bad.push((block, error)),
        }
        at += 1;
    }
    if let Some(label) = &found {
        for (block, error) in bad {
            if block == 0 || block == label.geometry.last_block() {
                notes.push(format!(
                    "label in block {block} of {}: {error}; its other copy was used",
                    device.info().uri
                ));
            }
        }
    } else if let Some((_, error)) = bad.iter().find(|(_, error)| *error != LabelError::Missing) {
        return Err(PoolError::new(PoolErrorKind::Failed, format!("{}: {error}", device.info().uri)));
    }
    Ok((notes, found))
}

pub(super) async fn read_labels(devices: &[Device]) -> Result<(Vec<Label>, Vec<String>), PoolError> {
    let (mut labels, mut notes): (Vec<Label>, Vec<String>) = Default::default();
    for device in devices {
        let (damage, label) = read_label(device).await?;
        let uri = &device.info().uri;
        let label = label.ok_or_else(|| PoolError::not_found(format!("{uri} holds no Rimrock pool")))?;
        unchanged_since(&label, device)?;
        if let Some(first) = labels.first()
            && first.pool != label.pool
        {
            return Err(PoolError::invalid(format!(
                "{uri} belongs to pool '{}', the others to '{}'",
                label.name, first.name
            )));
        }
        labels.push(label);
        notes.extend(damage);
    }
    Ok((labels, notes))
}

/// Refuses a device whose pool was destroyed, or that has become smaller than its label says.
pub(super) fn unchanged_since(label: &Label, device: &Device) -> Result<(), PoolError> {
    let uri = &device.info().uri;
    if !label.live {
        return Err(PoolError::not_found(format!("the pool on {uri} was destroyed")));
    }
    if label.geometry.device_blocks * BLOCK > device.info().size {
        return Err(PoolError::invalid(format!(
            "{uri} has {} bytes, but pool '{}' was made for {}: the device has shrunk",
            device.info().size,
            label.name,
            label.geometry.device_blocks * BLOCK
        )));
    }
    Ok(())
}

async fn write_labels(devices: &[Device], label: &Label) -> Result<(), PoolError> {
    for (vdev, device) in devices.iter().enumerate() {
        let own = Label { device: label.devices[vdev], vdev: vdev as u8, ..label.clone() };
        let bytes = own.encode();
        for block in [own.geometry.last_block(), 0] {
            device.write(block * BLOCK, DmaBuf::copy_of(&bytes).freeze()).await?;
        }
        device.flush().await?;
    }
    Ok(())
}

/// Gives the shard its place on this reactor and starts its committer.
fn start(shard: Shard, key: usize, reactor: Option<ReactorHandle>) {
    let shard = Rc::new(shard);
    shard.set_regions(Rc::new(Link { key, home: reactor }));
    local::install(key, Rc::clone(&shard));
    crate::reactor::spawn(async move { shard.keep_committed().await });
}

fn place(uuid: Uuid, shard: u16, owners: &Owners, geometry: Geometry, page_limit: usize) -> Place {
    Place { pool: uuid, shard, devices: owners.devices.clone().into(), geometry, page_limit }
}

/// What a pool works with in this process.
pub(super) struct Setting {
    /// Who owns its shards.
    pub owners: Arc<Owners>,
    /// Its home reactor.
    pub reactor: Option<ReactorHandle>,
    /// Clean pages that a shard keeps in memory.
    pub page_limit: usize,
    /// Where its events go.
    pub events: Option<EventSink>,
}

pub(super) async fn create(
    name: String,
    uuid: Uuid,
    geometry: Geometry,
    setting: Setting,
    force: bool,
) -> Result<(), PoolError> {
    let Setting { owners, reactor, page_limit, events } = setting;
    for device in &owners.devices {
        let uri = &device.info().uri;
        let found = match read_label(device).await {
            Ok((_, label)) => label
                .filter(|label| label.live)
                .map(|label| format!("{uri} holds a pool already ('{}'): import it", label.name)),
            // What cannot be read may be worth more than what can: of a newer version, or damaged.
            Err(error) if error.kind == PoolErrorKind::Failed => {
                Some(format!("a pool is there, but {}: find out what it is", error.text))
            }
            Err(error) => return Err(error),
        };
        if let (Some(found), false) = (found, force) {
            return Err(PoolError::exists(format!("{found}, or create with force to lose it")));
        }
    }
    let identities: Vec<Uuid> = owners.devices.iter().map(|_| new_uuid()).collect();
    let mut records = Records::new(geometry, owners.devices.len());
    records.pool.name.clone_from(&name);
    for shard in 0..geometry.shards {
        records.regions.grant(shard, Use::Metadata, Ask::Needed);
        records.regions.grant(shard, Use::Data, Ask::Needed);
    }
    let mut transaction = Changes::default().transaction(&records.pool);
    records.regions.put(&mut transaction);
    // An old label must not lead to the new pool's half-made parts.
    for device in &owners.devices {
        device.write(0, DmaBuf::zeroed(BLOCK_BYTES).freeze()).await?;
        // In a sparse file the fixed places get their space now: should the file system be full one day, journals and
        // catalog still work.
        device.write_zeroes(BLOCK, geometry.region(0) * BLOCK - BLOCK).await?;
    }
    let mut catalog = Catalog::create(uuid, &owners.devices, geometry, Map::new()).await?;
    catalog.commit(transaction).await?;
    for shard in 0..geometry.shards {
        let place = (uuid, shard, Arc::clone(&owners), geometry);
        let known = Known { regions: records.regions.of(shard), nodes: Vec::new(), volumes: Vec::new() };
        let home = reactor.clone();
        let made = at_home(owners.reactors[usize::from(shard)].clone(), move || async move {
            let (uuid, index, owners, geometry) = place;
            let shard = Shard::create(self::place(uuid, index, &owners, geometry, page_limit), known).await?;
            start(shard, owners.key, home);
            Ok::<(), PoolError>(())
        });
        if let Err(error) = made.await.unwrap_or_else(|error| Err(error.into())) {
            abandon(&owners).await;
            return Err(error);
        }
    }
    let label = Label {
        pool: uuid,
        name,
        device: identities[0],
        vdev: 0,
        devices: identities.clone(),
        live: true,
        created: unix_now(),
        geometry,
    };
    if let Err(error) = write_labels(&owners.devices, &label).await {
        abandon(&owners).await;
        return Err(error);
    }
    let key = owners.key;
    let home = Rc::new(Home::new(uuid, identities, geometry, owners, records, catalog, events));
    HOMES.with_borrow_mut(|homes| homes.insert(key, Rc::clone(&home)));
    home.keep_watch();
    Ok(())
}

pub(super) async fn open(label: Label, setting: Setting, damage: Vec<String>) -> Result<String, PoolError> {
    let owners = Arc::clone(&setting.owners);
    let key = owners.key;
    let home = match assemble(label, setting, damage).await {
        Ok(home) => Rc::new(home),
        Err(error) => {
            abandon(&owners).await;
            return Err(error);
        }
    };
    HOMES.with_borrow_mut(|homes| homes.insert(key, Rc::clone(&home)));
    home.resume();
    home.resume_scrub().await;
    home.keep_watch();
    let name = home.records.borrow().pool.name.clone();
    Ok(name)
}

/// Opens the shards and makes them one pool. After an error some of them may be at work.
async fn assemble(label: Label, setting: Setting, mut damage: Vec<String>) -> Result<Home, PoolError> {
    let Setting { owners, reactor, page_limit, events } = setting;
    let geometry = label.geometry;
    let (catalog, notes, unfinished) = Catalog::open(label.pool, &owners.devices, geometry).await?;
    damage.extend(notes);
    let mut records = Records::read(&catalog, geometry, owners.devices.len())?;
    let nodes: Vec<(NodeId, Lineage)> = records.nodes().map(|(id, node)| (id, node.lineage())).collect();
    let usage: HashMap<_, _> = records.volumes().map(|(id, _)| (id, Arc::default())).collect();
    let mut epoch = records.pool.epoch;
    let mut opening = Vec::new();
    for shard in 0..geometry.shards {
        let known = Known {
            regions: records.regions.of(shard),
            nodes: nodes.clone(),
            volumes: records
                .volumes()
                .map(|(id, volume)| (id, NodeId(volume.head), Arc::clone(&usage[&id])))
                .collect(),
        };
        let (uuid, owners, home) = (label.pool, Arc::clone(&owners), reactor.clone());
        let on = owners.reactors[usize::from(shard)].clone();
        opening.push(at_home(on, move || async move {
            let shard = Shard::open(place(uuid, shard, &owners, geometry, page_limit), known).await?;
            let epoch = shard.state.borrow().epoch;
            start(shard, owners.key, home);
            Ok::<u64, PoolError>(epoch)
        }));
    }
    for result in super::join::all(opening.into_iter()).await {
        epoch = epoch.max(result.unwrap_or_else(|error| Err(error.into()))?);
    }
    // Whatever was written before lies before the epoch that starts now.
    records.pool.epoch = epoch + 1;
    let (epoch, name) = (records.pool.epoch, records.pool.name.clone());
    let (uuid, devices) = (label.pool, label.devices.clone());
    let home = Home::new(uuid, devices, geometry, Arc::clone(&owners), records, catalog, events);
    home.commit(Changes::default()).await?;
    home.damage.borrow_mut().extend(damage.iter().cloned());
    for text in damage {
        tracing::warn!(pool = %name, "{text}");
    }
    if let Some(text) = unfinished {
        tracing::info!(pool = %name, "{text}");
        home.unfinished.borrow_mut().push(text);
    }
    if !home.damage.borrow().is_empty() {
        write_labels(&owners.devices, &label).await?;
    }
    let volumes: Vec<_> = home.records.borrow().volumes().map(|(id, v)| (id, NodeId(v.head))).collect();
    let usages: Vec<_> = volumes.iter().map(|(id, _)| Arc::clone(&usage[id])).collect();
    home.usage.borrow_mut().extend(usage);
    owners
        .each(move |shard| async move {
            let mut state = shard.state.borrow_mut();
            state.epoch = state.epoch.max(epoch);
            for ((_, head), usage) in volumes.iter().zip(usages) {
                usage.fetch_add(state.nodes.referenced(*head), Ordering::Relaxed);
            }
        })
        .await?;
    Ok(home)
}

/// Stops the shards of a pool that could not be opened or made as a whole.
async fn abandon(owners: &Arc<Owners>) {
    let key = owners.key;
    let stop = |shard: Rc<Shard>| async move {
        let _idle = shard.commit_lock.acquire(1).await;
        shard.closed.set(true);
        shard.changed.notify();
        shard.wake.notify();
    };
    for shard in 0..owners.reactors.len() as u16 {
        let _ = owners.on(shard, stop).await;
    }
    for reactor in owners.reactors.iter().cloned() {
        let _ = at_home(reactor, move || async move { local::remove(key) }).await;
    }
}

/// Commits everything and lets the devices go: when it returns, the pool neither reads nor writes them any more.
pub(super) async fn close(reactor: Option<ReactorHandle>, owners: Arc<Owners>) -> Result<(), PoolError> {
    let key = owners.key;
    at_home(reactor, move || async move {
        let home = home(key);
        // The operation under way, if any, comes to its end first, and no other one begins until all is over.
        let _turn = match &home {
            Some(home) => {
                home.closed.set(true);
                home.retire_handles();
                Some(home.operations.acquire(1).await)
            }
            None => None,
        };
        let committed = owners
            .each(|shard| async move {
                shard.closing.set(true);
                shard.commit().await
            })
            .await;
        let mut closed: Result<(), IoError> = committed.and_then(|all| all.into_iter().collect());
        if closed == Err(IoError::CapacityExceeded) {
            // The journals keep what could not be committed.
            closed = owners.flush().await;
        }
        let clean = closed.is_ok();
        let ended = owners.each(move |shard| async move { shard.end(clean).await }).await;
        if let Some(home) = &home {
            // Whoever still wants to record something finds that the catalog is gone.
            let _lock = home.catalog_lock.acquire(1).await;
            home.catalog.borrow_mut().take();
        }
        for reactor in owners.reactors.iter().cloned() {
            at_home(reactor, move || async move { local::remove(key) }).await?;
        }
        HOMES.with_borrow_mut(|homes| homes.remove(&key));
        closed?;
        ended?;
        Ok::<(), PoolError>(())
    })
    .await?
}
