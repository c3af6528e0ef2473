//! What each reactor holds of the open pools: its shards, found without a lock, and its flushes, made together.
#![forbid(unsafe_code)]

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::rc::Rc;
use std::sync::Arc;

use super::shard::Shard;
use crate::device::{Device, IoError};
use crate::reactor::ReactorHandle;
use crate::reactor::sync::Event;

thread_local! {
    static POOLS: RefCell<Vec<Option<Rc<Local>>>> = const { RefCell::new(Vec::new()) };
}

/// Who owns the shards of a pool; the same on every thread.
pub struct Owners {
    /// The pool's key in this process.
    pub key: usize,
    /// The reactor of each shard; `None` = whatever thread asks (tests without reactors).
    pub reactors: Vec<Option<ReactorHandle>>,
    /// The pool's devices.
    pub devices: Vec<Device>,
}

/// One pool on one reactor.
pub(super) struct Local {
    shards: RefCell<Vec<Option<Rc<Shard>>>>,
    /// Flushes asked for, started for, and done.
    asked: Cell<u64>,
    done: Cell<u64>,
    running: Cell<bool>,
    event: Event,
}

/// Puts a shard where this reactor finds it.
pub(super) fn install(key: usize, shard: Rc<Shard>) {
    let local = POOLS.with_borrow_mut(|pools| {
        if pools.len() <= key {
            pools.resize(key + 1, None);
        }
        Rc::clone(pools[key].get_or_insert_with(|| {
            Rc::new(Local {
                shards: RefCell::default(),
                asked: Cell::new(0),
                done: Cell::new(0),
                running: Cell::new(false),
                event: Event::new(),
            })
        }))
    });
    let mut shards = local.shards.borrow_mut();
    let index = usize::from(shard.index);
    if shards.len() <= index {
        shards.resize(index + 1, None);
    }
    shards[index] = Some(shard);
}

/// Forgets a pool on this reactor.
pub(super) fn remove(key: usize) {
    POOLS.with_borrow_mut(|pools| {
        if let Some(slot) = pools.get_mut(key) {
            *slot = None;
        }
    });
}

fn local(key: usize) -> Option<Rc<Local>> {
    POOLS.with_borrow(|pools| pools.get(key).cloned().flatten())
}

/// The shard, when this reactor owns it.
pub(super) fn shard(key: usize, index: u16) -> Option<Rc<Shard>> {
    POOLS.with_borrow(|pools| {
        let local = pools.get(key)?.as_ref()?;
        local.shards.borrow().get(usize::from(index))?.clone()
    })
}

impl Owners {
    /// Runs `work` with shard `index` on the reactor that owns it.
    pub async fn on<T, F, Fut>(&self, index: u16, work: F) -> Result<T, IoError>
    where
        T: Send + 'static,
        F: FnOnce(Rc<Shard>) -> Fut + Send + 'static,
        Fut: Future<Output = T> + 'static,
    {
        let key = self.key;
        match &self.reactors[usize::from(index)] {
            Some(reactor) if !reactor.is_current() => reactor
                .call(move || async move {
                    match shard(key, index) {
                        Some(shard) => Ok(work(shard).await),
                        None => Err(IoError::Gone),
                    }
                })
                .await
                .map_err(|_| IoError::Gone)?,
            _ => match shard(key, index) {
                Some(shard) => Ok(work(shard).await),
                None => Err(IoError::Gone),
            },
        }
    }

    /// Runs `work` with every shard, side by side. The results are in shard order.
    pub async fn each<T, F, Fut>(&self, work: F) -> Result<Vec<T>, IoError>
    where
        T: Send + 'static,
        F: FnOnce(Rc<Shard>) -> Fut + Clone + Send + 'static,
        Fut: Future<Output = T> + 'static,
    {
        let runs = (0..self.reactors.len() as u16).map(|index| self.on(index, work.clone()));
        super::join::all(runs).await.into_iter().collect()
    }

    /// Makes every change that was acknowledged before this call durable. Calls that meet on one reactor share
    /// one flush of the devices.
    pub async fn flush(self: &Arc<Owners>) -> Result<(), IoError> {
        let Some(local) = local(self.key) else { return self.flush_now().await };
        let ticket = local.asked.get() + 1;
        local.asked.set(ticket);
        loop {
            if local.done.get() >= ticket {
                return Ok(());
            }
            if !local.running.replace(true) {
                let covers = local.asked.get();
                let flushed = Turn(&local).run(self).await;
                flushed?;
                local.done.set(local.done.get().max(covers));
                continue;
            }
            local.event.wait().await;
        }
    }

    async fn flush_now(&self) -> Result<(), IoError> {
        let mut marks = Vec::new();
        for (index, mark) in
            self.each(|shard| async move { shard.write_journal().await }).await?.into_iter().enumerate()
        {
            if let Some(mark) = mark? {
                marks.push((index as u16, mark));
            }
        }
        if marks.is_empty() {
            return Ok(());
        }
        super::shard::flush_all(&self.devices).await?;
        for (index, mark) in marks {
            self.on(index, move |shard| async move { shard.mark_durable(mark) }).await?;
        }
        Ok(())
    }
}

/// The flush under way on this reactor; over even when its caller goes away.
struct Turn<'a>(&'a Local);

impl Turn<'_> {
    async fn run(self, owners: &Owners) -> Result<(), IoError> {
        owners.flush_now().await
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.running.set(false);
        self.0.event.notify();
    }
}
