//! Identify: the data structures that describe controller, namespaces and lists (Base 2.0, 5.17; NVM 1.0, 4.1.5).
//!
//! An NSID is judged before it is used: 0, FFFFFFFFh and anything above NN name no namespace; one up to NN without a
//! namespace behind it is inactive, which is not an error where the structure says "zero filled".
#![forbid(unsafe_code)]

use std::sync::atomic::Ordering;

use zerocopy::{FromZeros, Immutable, IntoBytes};

use super::ana::{AnaState, TRANSITION_TIME_S};
use super::controller::Controller;
use super::io::{COPY_BYTES_MAX, COPY_RANGES_MAX};
use super::namespace::{Namespace, NamespaceMap};
use super::persistent_events::SIZE_MAX_64KIB;
use super::spec::TransportOptions;
use crate::nvme::base::NSID_ALL;
use crate::nvme::command::Identify;
use crate::nvme::fabrics::Version;
use crate::nvme::features::AsyncEventConfiguration;
use crate::nvme::identify::{
    self, Anacap, Cmic, CommandSetList, ControllerList, Ctratt, Dlfeat, IDENTIFY_LEN, IdentifyController,
    IdentifyNamespace, IndependentNamespace, Lpa, NamespaceList, Nsfeat, NvmController, NvmNamespace, Oncs,
    Sgls, Vwc, cns, csi, nidt,
};
use crate::nvme::status::Status;

/// Abort commands that may be outstanding.
pub const ABORT_LIMIT: usize = 4;
/// Granularity of the keep alive timer, in units of 100 ms.
pub const KEEP_ALIVE_GRANULARITY: u16 = 1;
/// Entries of the error log.
pub const ERROR_LOG_ENTRIES: usize = 64;
/// Bit 0 of the NSFEAT of an I/O command set independent namespace (Base 2.1): no volatile write cache.
const NO_WRITE_CACHE: u8 = 1 << 0;
/// CNTRLTYPE (Base figure 275).
const TYPE_IO: u8 = 1;
const TYPE_DISCOVERY: u8 = 2;

type Page = Box<[u8; IDENTIFY_LEN]>;

/// Answers an Identify command with its 4096 bytes.
pub fn identify(
    command: &Identify,
    controller: &Controller,
    options: &TransportOptions,
) -> Result<Page, Status> {
    if controller.subsystem.is_discovery() {
        return match command.cns {
            cns::CONTROLLER => Ok(page(&describe_discovery(controller, options))),
            _ => Err(Status::INVALID_FIELD.with_dnr()),
        };
    }
    let namespaces = controller.subsystem.namespaces();
    let of_nvm = || if command.csi == csi::NVM { Ok(()) } else { Err(Status::INVALID_FIELD.with_dnr()) };
    let active = || active(command.nsid, controller, &namespaces);
    match command.cns {
        cns::NAMESPACE | cns::ALLOCATED_NAMESPACE => {
            Ok(active()?.map_or_else(zeros, |ns| page(&describe_reached(ns, controller))))
        }
        cns::CONTROLLER => Ok(page(&describe_controller(controller, options, &namespaces))),
        cns::ACTIVE_NAMESPACES | cns::ALLOCATED_NAMESPACES => list_namespaces(command.nsid, &namespaces),
        cns::NAMESPACE_DESCRIPTORS => {
            Ok(describe_identities(active()?.ok_or(Status::INVALID_NAMESPACE.with_dnr())?))
        }
        cns::CSI_NAMESPACE | cns::CSI_ALLOCATED_NAMESPACE => {
            of_nvm()?;
            active()?;
            // No protection information, no storage tags: all of it is zero for any namespace.
            Ok(page(&NvmNamespace::new_zeroed()))
        }
        cns::CSI_CONTROLLER => {
            of_nvm()?;
            // Zeroes: Verify, Write Zeroes and Dataset Management are limited by nothing but what the commands can say.
            Ok(page(&NvmController::new_zeroed()))
        }
        cns::CSI_ACTIVE_NAMESPACES | cns::CSI_ALLOCATED_NAMESPACES => {
            of_nvm()?;
            list_namespaces(command.nsid, &namespaces)
        }
        cns::INDEPENDENT_NAMESPACE => {
            Ok(active()?.map_or_else(zeros, |ns| page(&describe_independent(ns, controller))))
        }
        cns::ATTACHED_CONTROLLERS => {
            active()?.ok_or(Status::INVALID_NAMESPACE.with_dnr())?;
            Ok(list_controllers(command.cntid, controller))
        }
        cns::CONTROLLERS => Ok(list_controllers(command.cntid, controller)),
        cns::COMMAND_SETS if matches!(command.cntid, 0xFFFF) || command.cntid == controller.cntlid => {
            let mut list = CommandSetList::new_zeroed();
            list.combinations[0] = (1 << csi::NVM).into();
            Ok(page(&list))
        }
        _ => Err(Status::INVALID_FIELD.with_dnr()),
    }
}

fn page<T: IntoBytes + Immutable>(structure: &T) -> Page {
    let mut page = zeros();
    page.copy_from_slice(structure.as_bytes());
    page
}

fn zeros() -> Page {
    Box::new([0; IDENTIFY_LEN])
}

/// The namespace, `None` when the NSID is valid but inactive.
fn active<'a>(
    nsid: u32,
    controller: &Controller,
    namespaces: &'a NamespaceMap,
) -> Result<Option<&'a Namespace>, Status> {
    if nsid == 0 || nsid > controller.subsystem.max_namespaces {
        return Err(Status::INVALID_NAMESPACE.with_dnr());
    }
    Ok(namespaces.get(nsid).map(|namespace| &**namespace))
}

fn describe_common(controller: &Controller, options: &TransportOptions) -> IdentifyController {
    let subsystem = &controller.subsystem;
    let mut id = IdentifyController::new_zeroed();
    IdentifyController::set_text(&mut id.sn, &subsystem.serial_number);
    IdentifyController::set_text(&mut id.mn, &subsystem.model_number);
    IdentifyController::set_text(&mut id.fr, env!("CARGO_PKG_VERSION"));
    id.mdts = (options.max_io_size / 4096).trailing_zeros() as u8;
    id.cntlid = controller.cntlid.into();
    id.ver = Version::V2_0.0.into();
    id.rtd3e = (super::registers::READY_TIMEOUT_MS as u32 * 1000).into();
    id.aerl = (options.max_async_events - 1) as u8;
    id.lpa = Lpa(0).with_extended_data(true).0;
    id.kas = KEEP_ALIVE_GRANULARITY.into();
    id.maxcmd = options.max_queue_depth.into();
    id.sgls = Sgls(0).with_support(1).with_offset(true).with_transport(true).0.into();
    id.subnqn = subsystem.nqn.to_field();
    // In units of 16 bytes, with the 64 bytes of the command.
    id.ioccsz = (4 + options.in_capsule_data_size / 16).into();
    id.iorcsz = 1.into();
    id.msdbd = 1;
    id.ctratt = Ctratt(0).with_host_id_128(true).with_tbkas(true).0.into();
    id
}

fn describe_discovery(controller: &Controller, options: &TransportOptions) -> IdentifyController {
    let mut id = describe_common(controller, options);
    id.cntrltype = TYPE_DISCOVERY;
    id.oaes = AsyncEventConfiguration(0).with_discovery_log_change(true).0.into();
    id
}

fn describe_controller(
    controller: &Controller,
    options: &TransportOptions,
    namespaces: &NamespaceMap,
) -> IdentifyController {
    let mut id = describe_common(controller, options);
    id.cntrltype = TYPE_IO;
    let has_ana = controller.subsystem.ana_reporting;
    id.cmic = Cmic(0).with_multi_port(true).with_multi_controller(true).with_ana(has_ana).0;
    id.oaes = AsyncEventConfiguration(0).with_namespace_attribute(true).with_ana_change(has_ana).0.into();
    if has_ana {
        id.anatt = TRANSITION_TIME_S;
        id.anacap = Anacap(0)
            .with_optimized(true)
            .with_non_optimized(true)
            .with_inaccessible(true)
            .with_persistent_loss(true)
            .with_change(true)
            .with_group_is_stable(true)
            .0;
        // As many as there may be namespaces: each may have a group of its own.
        id.anagrpmax = controller.subsystem.max_namespaces.into();
        id.nanagrpid = controller.subsystem.max_namespaces.into();
    }
    id.acl = (ABORT_LIMIT - 1) as u8;
    // One firmware slot, read only.
    id.frmw = 1 << 1 | 1;
    id.lpa = Lpa(id.lpa).with_command_effects(true).with_persistent_events(true).0;
    id.pels = SIZE_MAX_64KIB.into();
    id.elpe = (ERROR_LOG_ENTRIES - 1) as u8;
    id.sqes = 0x66;
    id.cqes = 0x44;
    id.nn = controller.subsystem.max_namespaces.into();
    id.mnan = controller.subsystem.max_namespaces.into();
    id.oncs = Oncs(0)
        .with_compare(true)
        .with_dataset_management(true)
        .with_write_zeroes(true)
        .with_timestamp(true)
        .with_verify(true)
        .with_copy(true)
        .0
        .into();
    // Compare and Write. ACWU of 0 is one block; a namespace may say more (NACWU).
    id.fuses = 1.into();
    // Source ranges of formats 0 and 1.
    id.ocfs = 0b11.into();
    // Once a host was told of a cache it flushes; one that was not told gets durable writes (see `cache_reported`).
    let cached = namespaces.iter().any(|ns| ns.backend.has_write_cache());
    if cached {
        controller.cache_reported.store(true, Ordering::Relaxed);
    }
    id.vwc = Vwc(0).with_present(controller.cache_reported.load(Ordering::Relaxed)).with_flush_all(3).0;
    // Disconnect of a single I/O queue.
    id.ofcs = 1.into();
    id
}

/// As [`describe`], with what depends on how the controller reaches the namespace.
fn describe_reached(namespace: &Namespace, controller: &Controller) -> IdentifyNamespace {
    let mut id = describe(namespace);
    if controller.subsystem.ana_reporting {
        id.anagrpid = namespace.ana_group.into();
        // How much is in use is not known by a path that does not reach it (Base 2.0, 8.20.3.3 and 8.20.3.4).
        let state = controller.access.of(namespace.ana_group);
        if matches!(state, AnaState::Inaccessible | AnaState::PersistentLoss) {
            id.nuse = 0.into();
        }
    }
    id
}

pub(super) fn describe(namespace: &Namespace) -> IdentifyNamespace {
    let mut id = IdentifyNamespace::new_zeroed();
    let blocks = namespace.blocks();
    let thin = namespace.backend.is_thin();
    id.nsze = blocks.into();
    id.ncap = blocks.into();
    id.nuse = match thin {
        true => (namespace.backend.allocated() >> namespace.block_shift).min(blocks).into(),
        false => blocks.into(),
    };
    let atomic = (namespace.backend.atomic_bytes() >> namespace.block_shift).clamp(1, 0x1_0000) - 1;
    id.nsfeat = Nsfeat(0).with_thinp(thin).with_nsabp(atomic > 0).with_optperf(true).0;
    if atomic > 0 {
        id.nawun = (atomic as u16).into();
        id.nawupf = (atomic as u16).into();
        id.nacwu = (atomic as u16).into();
        // Only aligned writes are not torn: a boundary lies at every multiple of the unit.
        id.nabsn = (atomic as u16).into();
        id.nabspf = (atomic as u16).into();
    }
    id.nmic = 1;
    id.nvmcap = u128::from(blocks << namespace.block_shift).into();
    let copy_blocks = COPY_BYTES_MAX >> namespace.block_shift;
    id.mssrl = (copy_blocks as u16).into();
    id.mcl = (copy_blocks as u32).into();
    id.msrc = (COPY_RANGES_MAX - 1) as u8;
    let granule = (namespace.backend.granularity() >> namespace.block_shift).max(1) as u16 - 1;
    id.npwg = granule.into();
    id.npwa = granule.into();
    // The commands are the controller's, so that every namespace takes them; what they do is each one's.
    if namespace.backend.can_deallocate() {
        id.dlfeat = Dlfeat(0).with_reads_as(1).with_write_zeroes_deallocates(true).0;
        id.npdg = granule.into();
        id.npda = granule.into();
    }
    id.nsattr = u8::from(namespace.read_only);
    id.nguid = namespace.nguid;
    id.eui64 = namespace.eui64.unwrap_or_default();
    id.lbaf[0].lbads = namespace.block_shift as u8;
    id
}

fn describe_independent(namespace: &Namespace, controller: &Controller) -> IndependentNamespace {
    let mut id = IndependentNamespace::new_zeroed();
    if controller.subsystem.ana_reporting {
        id.anagrpid = namespace.ana_group.into();
    }
    id.nsfeat = if namespace.backend.has_write_cache() { 0 } else { NO_WRITE_CACHE };
    id.nmic = 1;
    id.nsattr = u8::from(namespace.read_only);
    id.nstat = 1;
    id
}

fn describe_identities(namespace: &Namespace) -> Page {
    let mut list: Vec<(u8, &[u8])> = Vec::with_capacity(4);
    if let Some(eui64) = &namespace.eui64 {
        list.push((nidt::EUI64, eui64));
    }
    list.push((nidt::NGUID, &namespace.nguid));
    list.push((nidt::UUID, namespace.uuid.as_bytes()));
    list.push((nidt::CSI, &[csi::NVM]));
    identify::descriptor_page(list)
}

/// The active namespaces above `nsid`.
fn list_namespaces(nsid: u32, namespaces: &NamespaceMap) -> Result<Page, Status> {
    if nsid >= NSID_ALL - 1 {
        return Err(Status::INVALID_NAMESPACE.with_dnr());
    }
    let mut list = NamespaceList::new_zeroed();
    let above = namespaces.iter().map(|namespace| namespace.nsid).filter(|&found| found > nsid);
    for (entry, found) in list.nsids.iter_mut().zip(above) {
        *entry = found.into();
    }
    Ok(page(&list))
}

/// The subsystem's controllers from `cntid` on.
fn list_controllers(cntid: u16, controller: &Controller) -> Page {
    let mut list = ControllerList::new_zeroed();
    let found: Vec<u16> =
        controller.subsystem.controllers().iter().map(|c| c.cntlid).filter(|&id| id >= cntid).collect();
    for (entry, id) in list.cntlids.iter_mut().zip(&found) {
        *entry = (*id).into();
    }
    list.count = (found.len().min(list.cntlids.len()) as u16).into();
    page(&list)
}
