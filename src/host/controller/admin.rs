//! Admin commands: Identify, log pages, features, events.
#![forbid(unsafe_code)]

use zerocopy::FromBytes;

use super::{Controller, succeeded};
use crate::host::{CommandQueue, Data, HostError, Namespace};
use crate::nvme::Sqe;
use crate::nvme::base::{NSID_ALL, admin};
use crate::nvme::command::{Abort, Features, GetLogPage, Identify};
use crate::nvme::features::{AsyncEvent, NumberOfQueues, fid};
use crate::nvme::identify::{IDENTIFY_LEN, IdentifyController, IdentifyNamespace, NamespaceList, cns};
use crate::nvme::log::{DiscoveryLogEntry, DiscoveryLogHeader, lid};

/// One Get Log Page asks for this much at a time, well below any MDTS.
const LOG_PIECE_BYTES: usize = 4096;
/// A discovery log of more entries than this is not believed: it would be 64 MiB.
const DISCOVERY_ENTRIES_MAX: u64 = 65536;
/// A list of more namespaces than this is not believed: a controller could go on for ever.
const NAMESPACES_MAX: usize = 65536;
/// How often a discovery log that changes while it is read is read again.
const DISCOVERY_TRIES: usize = 10;

impl<Q: CommandQueue> Controller<Q> {
    /// An admin command that returns data of a fixed layout.
    async fn read_struct<T>(&self, name: &'static str, sqe: Sqe) -> Result<Box<T>, HostError>
    where
        T: FromBytes,
    {
        let bytes = self.read_bytes(name, sqe, size_of::<T>()).await?;
        T::read_from_bytes(&bytes)
            .map(Box::new)
            .map_err(|_| HostError::Invalid { what: "the buffer has another length" })
    }

    /// An admin command that returns `len` bytes.
    pub async fn read_bytes(&self, name: &'static str, sqe: Sqe, len: usize) -> Result<Q::In, HostError> {
        let (result, data) = self.admin.execute(sqe, Data::In(Q::in_buffer(len))).await;
        succeeded(name, result?)?;
        match data {
            Data::In(buf) => Ok(buf),
            _ => Err(HostError::Invalid { what: "the command's buffer did not come back" }),
        }
    }

    /// Any Identify data structure as it is, [`IDENTIFY_LEN`] bytes.
    pub async fn identify_page(&self, command: Identify) -> Result<Q::In, HostError> {
        self.read_bytes("Identify", command.to_sqe(), IDENTIFY_LEN).await
    }

    pub async fn identify_controller(&self) -> Result<Box<IdentifyController>, HostError> {
        let command = Identify { cns: cns::CONTROLLER, ..Identify::default() };
        self.read_struct("Identify Controller", command.to_sqe()).await
    }

    pub async fn identify_namespace(&self, nsid: u32) -> Result<Box<IdentifyNamespace>, HostError> {
        let command = Identify { cns: cns::NAMESPACE, nsid, ..Identify::default() };
        self.read_struct("Identify Namespace", command.to_sqe()).await
    }

    /// The active namespaces, in rising order of their IDs.
    pub async fn active_namespaces(&self) -> Result<Vec<u32>, HostError> {
        let mut out: Vec<u32> = Vec::new();
        loop {
            let nsid = out.last().copied().unwrap_or(0);
            let command = Identify { cns: cns::ACTIVE_NAMESPACES, nsid, ..Identify::default() };
            let page: Box<NamespaceList> =
                self.read_struct("Identify active namespaces", command.to_sqe()).await?;
            let before = out.len();
            for nsid in page.nsids.iter().map(|n| n.get()).take_while(|&n| n != 0) {
                if out.last().is_some_and(|&last| nsid <= last) {
                    return Err(HostError::Nonsense { what: "the namespace list is not in rising order" });
                }
                out.push(nsid);
            }
            if out.len() > NAMESPACES_MAX {
                return Err(HostError::Nonsense { what: "the controller lists more than 65536 namespaces" });
            }
            // A full page may be followed by another.
            if out.len() - before < page.nsids.len() || out.last() >= Some(&(NSID_ALL - 1)) {
                return Ok(out);
            }
        }
    }

    /// What a host needs to know of one namespace.
    pub async fn namespace(&self, nsid: u32) -> Result<Namespace, HostError> {
        let identify = self.identify_namespace(nsid).await?;
        let command = Identify { cns: cns::NAMESPACE_DESCRIPTORS, nsid, ..Identify::default() };
        let descriptors = self.identify_page(command).await?;
        Namespace::new(nsid, &identify, &descriptors)
    }

    /// A log page, or `len` bytes of it from `offset` on (both multiples of 4). `rae` keeps the event that announced it.
    pub async fn log_page(
        &self,
        lid: u8,
        nsid: u32,
        offset: u64,
        len: usize,
        rae: bool,
    ) -> Result<Vec<u8>, HostError> {
        if !len.is_multiple_of(4) || len == 0 {
            return Err(HostError::Invalid { what: "a log page is read in multiples of 4 bytes" });
        }
        let mut out = Vec::with_capacity(len);
        while out.len() < len {
            let piece = (len - out.len()).min(LOG_PIECE_BYTES);
            let last = out.len() + piece == len;
            let command = GetLogPage {
                nsid,
                lid,
                // Only the last piece may clear the event, or the log could change under the reader unnoticed.
                rae: rae || !last,
                dwords: piece as u64 / 4,
                lpo: offset + out.len() as u64,
                ..GetLogPage::default()
            };
            out.extend_from_slice(&self.read_bytes("Get Log Page", command.to_sqe(), piece).await?);
        }
        Ok(out)
    }

    /// The discovery log: its generation and its entries, of one instant.
    pub async fn discovery_log(&self) -> Result<(u64, Vec<DiscoveryLogEntry>), HostError> {
        const HEADER: usize = size_of::<DiscoveryLogHeader>();
        const ENTRY: usize = size_of::<DiscoveryLogEntry>();
        for _ in 0..DISCOVERY_TRIES {
            let before = self.discovery_header(true).await?;
            let records = before.numrec.get();
            if records > DISCOVERY_ENTRIES_MAX {
                return Err(HostError::Nonsense { what: "the discovery log has millions of entries" });
            }
            if before.recfmt.get() != 0 {
                return Err(HostError::Nonsense { what: "the discovery log's record format is unknown" });
            }
            let entries = match records as usize {
                0 => Vec::new(),
                n => self.log_page(lid::DISCOVERY, 0, HEADER as u64, n * ENTRY, true).await?,
            };
            let after = self.discovery_header(false).await?;
            if before.genctr == after.genctr {
                let entries = entries.chunks_exact(ENTRY).flat_map(DiscoveryLogEntry::read_from_bytes);
                return Ok((before.genctr.get(), entries.collect()));
            }
        }
        Err(HostError::LogChanging)
    }

    async fn discovery_header(&self, rae: bool) -> Result<DiscoveryLogHeader, HostError> {
        let bytes = self.log_page(lid::DISCOVERY, 0, 0, size_of::<DiscoveryLogHeader>(), rae).await?;
        DiscoveryLogHeader::read_from_bytes(&bytes)
            .map_err(|_| HostError::Invalid { what: "the discovery log header has another length" })
    }

    /// Get Features: dword 0 of the completion. For features without a data buffer.
    pub async fn get_feature(&self, feature: u8) -> Result<u32, HostError> {
        let command = Features { fid: feature, ..Features::default() };
        Ok(self.admin_command("Get Features", command.to_get_sqe()).await?.dw0.get())
    }

    /// Set Features: dword 0 of the completion. For features without a data buffer.
    pub async fn set_feature(&self, feature: u8, value: u32) -> Result<u32, HostError> {
        let command = Features { fid: feature, cdw11: value, ..Features::default() };
        Ok(self.admin_command("Set Features", command.to_set_sqe()).await?.dw0.get())
    }

    /// Asks for I/O queues; returns how many may be connected.
    pub async fn request_queues(&self, wanted: u16) -> Result<u16, HostError> {
        let granted =
            NumberOfQueues(self.set_feature(fid::NUMBER_OF_QUEUES, NumberOfQueues::pairs(wanted).0).await?);
        let granted = granted.submission().min(granted.completion()) + 1;
        Ok(granted.min(wanted.into()) as u16)
    }

    /// Resets the controller's keep alive timer.
    pub async fn keep_alive(&self) -> Result<(), HostError> {
        keep_alive(&*self.admin).await
    }

    /// Waits for the next asynchronous event.
    pub async fn next_event(&self) -> Result<AsyncEvent, HostError> {
        let cqe =
            self.admin_command("Asynchronous Event Request", Sqe::new(admin::ASYNC_EVENT_REQUEST, 0)).await?;
        Ok(AsyncEvent(cqe.dw0.get()))
    }

    /// Asks for a command to be aborted; whether it was. The command itself completes in any case.
    pub async fn abort(&self, sqid: u16, cid: u16) -> Result<bool, HostError> {
        let cqe = self.admin_command("Abort", Abort { sqid, cid }.to_sqe()).await?;
        Ok(cqe.dw0.get() & 1 == 0)
    }
}

/// Keep Alive on an admin queue.
pub async fn keep_alive<Q: CommandQueue>(admin_queue: &Q) -> Result<(), HostError> {
    let (result, _) = admin_queue.execute(Sqe::new(admin::KEEP_ALIVE, 0), Data::None).await;
    succeeded("Keep Alive", result?).map(drop)
}
