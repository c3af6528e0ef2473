//! The open devices, by name.
//!
//! Owns which names are taken and who uses each device. A device opened here lives until it is deleted, or, when
//! a pool command opened it by URI, until that pool is gone. Nothing of this survives the daemon: pools find
//! their devices again by what the configuration file or the operator names.
#![forbid(unsafe_code)]

use super::error::RpcError;
use crate::device::{Device, DeviceError, OpenOptions};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::error::Error;
use std::rc::Rc;
use std::time::{Duration, Instant};
use tokio::sync::Notify;
use uuid::Uuid;

/// Which call opened a device; SPDK's clients see it as the product name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Origin {
    /// `device_create` or the configuration file.
    Named,
    /// A pool command that named a URI; closed with the pool.
    Pool,
    /// `bdev_malloc_create`.
    Malloc,
    /// `bdev_aio_create` on that file.
    Aio {
        /// The file.
        filename: String,
        /// Whether writes are refused.
        read_only: bool,
        /// Whether the block size was given.
        block_size_given: bool,
    },
    /// `bdev_uring_create` on that file.
    Uring {
        /// The file.
        filename: String,
    },
}

/// An open device and what is known about it here.
pub struct OpenDevice {
    /// Its name, unique among devices.
    pub name: String,
    /// The URI as it was given.
    pub uri: String,
    /// The handle.
    pub device: Device,
    /// Its UUID as clients see it.
    pub uuid: Uuid,
    /// Which call opened it.
    pub origin: Origin,
    /// The pool it is part of.
    pub pool: RefCell<Option<String>>,
}

/// What is to be opened.
pub struct Opening {
    /// Its name; made from the URI when missing.
    pub name: Option<String>,
    /// What to open.
    pub uri: String,
    /// How.
    pub options: OpenOptions,
    /// The UUID to show; the device's own when missing.
    pub uuid: Option<Uuid>,
    /// On whose behalf.
    pub origin: Origin,
    /// The parameter that named the URI, for error answers.
    pub field: &'static str,
}

/// All open devices.
#[derive(Default)]
pub struct Devices {
    /// `None` while a device of that name is being opened.
    by_name: RefCell<BTreeMap<String, Option<Rc<OpenDevice>>>>,
    opened: Notify,
}

/// Devices set aside for a pool before it is there, so that nobody else takes them meanwhile. Dropped without
/// [`Claim::keep`], it gives them back.
pub struct Claim<'a> {
    devices: &'a Devices,
    held: Vec<Rc<OpenDevice>>,
}

impl Claim<'_> {
    /// The devices.
    pub fn held(&self) -> &[Rc<OpenDevice>] {
        &self.held
    }

    /// Adds a device that nothing uses.
    pub fn add(&mut self, device: Rc<OpenDevice>) {
        *device.pool.borrow_mut() = Some("that is coming up".to_owned());
        self.held.push(device);
    }

    /// The pool is there: the devices are its own from now on.
    pub fn keep(mut self, pool: &str) {
        self.devices.set_pool(&std::mem::take(&mut self.held), Some(pool));
    }
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        self.devices.set_pool(&self.held, None);
    }
}

impl Devices {
    /// Opens a device. Opening blocks (a file may be created), so it runs off the control thread.
    pub async fn open(&self, opening: Opening) -> Result<Rc<OpenDevice>, RpcError> {
        let Opening { name, uri, options, uuid, origin, field } = opening;
        let name = match name {
            Some(name) => name,
            None => self.free_name(&uri),
        };
        if self.by_name.borrow().contains_key(&name) {
            return Err(RpcError::refused(libc::EEXIST, format!("a device named {name} is open already")));
        }
        self.by_name.borrow_mut().insert(name.clone(), None);
        let address = uri.clone();
        let opened = tokio::task::spawn_blocking(move || Device::open(&address, options)).await;
        self.by_name.borrow_mut().remove(&name);
        self.opened.notify_waiters();
        let device = match opened {
            Ok(Ok(device)) => device,
            Ok(Err(error)) => return Err(open_error(field, &error)),
            Err(_) => return Err(RpcError::refused(libc::EIO, format!("opening {uri} was interrupted"))),
        };
        let uuid = uuid.unwrap_or(device.info().uuid);
        let open = OpenDevice { name: name.clone(), uri, device, uuid, origin, pool: RefCell::new(None) };
        let open = Rc::new(open);
        self.by_name.borrow_mut().insert(name, Some(open.clone()));
        Ok(open)
    }

    /// Waits until no device of that name is being opened.
    pub async fn until_opened(&self, name: &str) {
        while matches!(self.by_name.borrow().get(name), Some(None)) {
            self.opened.notified().await;
        }
    }

    /// An empty claim.
    pub fn claim(&self) -> Claim<'_> {
        Claim { devices: self, held: Vec::new() }
    }

    /// The device of that name or UUID.
    pub fn find(&self, name: &str) -> Option<Rc<OpenDevice>> {
        let devices = self.by_name.borrow();
        if let Some(found) = devices.get(name) {
            return found.clone();
        }
        let uuid = Uuid::try_parse(name).ok()?;
        devices.values().flatten().find(|device| device.uuid == uuid).cloned()
    }

    /// Every device, by name.
    pub fn all(&self) -> Vec<Rc<OpenDevice>> {
        self.by_name.borrow().values().flatten().cloned().collect()
    }

    /// Forgets a device; it is closed once nobody uses its handle. The caller has made sure that it is free.
    pub fn remove(&self, name: &str) {
        self.by_name.borrow_mut().remove(name);
    }

    /// Closes a forgotten device, unless somebody still has it. To give memory back takes the longer the more it is, so
    /// it is not done on the control thread.
    pub async fn close(&self, device: Rc<OpenDevice>) {
        let handle = device.device.clone();
        drop(device);
        let _ = tokio::task::spawn_blocking(move || drop(handle)).await;
    }

    /// Waits until a device that nothing uses any more is used by nothing: tasks on reactors let go of a pool's
    /// devices a moment after the pool is gone, and whoever asked for that may open the file again at once.
    pub async fn settle(&self, device: &OpenDevice) {
        const PATIENCE: Duration = Duration::from_secs(2);
        let started = Instant::now();
        while device.device.is_shared() && started.elapsed() < PATIENCE {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    /// Marks the devices as parts of a pool, or of none. Those that a pool command opened go with their pool.
    pub fn set_pool(&self, devices: &[Rc<OpenDevice>], pool: Option<&str>) {
        for device in devices {
            *device.pool.borrow_mut() = pool.map(str::to_owned);
            if pool.is_none() && device.origin == Origin::Pool {
                self.remove(&device.name);
            }
        }
    }

    /// The devices of a pool.
    pub fn of_pool(&self, pool: &str) -> Vec<Rc<OpenDevice>> {
        self.all().into_iter().filter(|device| device.pool.borrow().as_deref() == Some(pool)).collect()
    }

    /// A free name for a device that was given by URI: its file's name, or its kind.
    fn free_name(&self, uri: &str) -> String {
        let (kind, rest) = uri.split_once(':').unwrap_or(("device", uri));
        let path = rest.split('?').next().unwrap_or_default();
        let stem = match path.rsplit('/').next() {
            Some(file) if path.contains('/') && super::names::name(file).is_ok() => file,
            _ => kind,
        };
        let taken = self.by_name.borrow();
        let numbered = |number: u32| if number == 0 { stem.to_owned() } else { format!("{stem}-{number}") };
        (0..).map(numbered).find(|name| !taken.contains_key(name)).unwrap_or_default()
    }
}

/// The error of an open: an errno where the system gave one, else the parameter is at fault.
fn open_error(field: &'static str, error: &DeviceError) -> RpcError {
    let mut source: Option<&dyn Error> = Some(error);
    while let Some(cause) = source {
        let io = cause.downcast_ref::<std::io::Error>();
        if let Some(errno) = io.and_then(std::io::Error::raw_os_error) {
            return RpcError::refused(errno, error.to_string()).with("field", field);
        }
        source = cause.source();
    }
    RpcError::field(field, error.to_string())
}
