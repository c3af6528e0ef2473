//! Where a stream goes: standard output, or a file that has its name only when it is whole.
#![forbid(unsafe_code)]

use super::widen;
use crate::cli::Failure;
use crate::stream::{Encoder, Header, Totals};
use crossbeam_channel::{Receiver, Sender};
use std::fs::{File, OpenOptions};
use std::io::{self, BufWriter, ErrorKind, IsTerminal, Write};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

/// Small records are put together before they are written.
const BUFFER_BYTES: usize = 256 << 10;

/// What comes next in a stream.
pub enum Item {
    /// What lies at an offset.
    Data(u64, Vec<u8>),
    /// A range that became zero: offset and length.
    Zero(u64, u64),
}

/// Where a stream goes.
pub struct Output {
    file: File,
    /// The name it shall have, and the one it has until it is whole.
    names: Option<(PathBuf, PathBuf)>,
}

/// Why a stream was not written.
#[derive(Debug, thiserror::Error)]
pub enum WriteFault {
    /// The system's reason.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// What was read cannot be a stream.
    #[error("what the daemon gave cannot be sent: {0}")]
    Stream(#[from] crate::stream::StreamError),
    /// Whoever reads stopped before the end.
    #[error("the transfer was broken off")]
    BrokenOff,
}

impl Output {
    /// Standard output, unless that is a terminal.
    pub fn stdout() -> Result<Output, Failure> {
        let stdout = io::stdout();
        if stdout.is_terminal() {
            return Err(Failure::usage("a stream is not for a terminal")
                .hint("name a file with --file, or put `| rimrock snapshot receive` behind it"));
        }
        let file = stdout.as_fd().try_clone_to_owned().map(File::from);
        let file = file.map_err(|error| Failure::failed(format!("cannot write to it: {error}")))?;
        widen(&file);
        Ok(Output { file, names: None })
    }

    /// A file. One that exists is replaced only when that is wanted, and only by a whole one.
    pub fn file(path: &Path, force: bool) -> Result<Output, Failure> {
        let failed = |error: io::Error| Failure::failed(format!("cannot write {}: {error}", path.display()));
        match std::fs::metadata(path) {
            Ok(found) if found.is_file() && !force => {
                return Err(Failure::failed(format!("{} exists already", path.display()))
                    .hint("name another file, or have it replaced with --force"));
            }
            // A tape, a pipe with a name, /dev/null.
            Ok(found) if !found.is_file() => {
                let file = OpenOptions::new().write(true).open(path).map_err(failed)?;
                widen(&file);
                return Ok(Output { file, names: None });
            }
            _ => {}
        }
        let mut partial = path.as_os_str().to_owned();
        partial.push(".partial");
        let partial = PathBuf::from(partial);
        let file = File::create(&partial).map_err(failed)?;
        Ok(Output { file, names: Some((path.to_owned(), partial)) })
    }

    /// Gives up what was written.
    pub fn discard(&self) {
        if let Some((_, partial)) = &self.names {
            drop(std::fs::remove_file(partial));
        }
    }

    /// What was written is whole: makes it durable and gives it its name.
    pub fn keep(&self) -> io::Result<()> {
        let Some((path, partial)) = &self.names else { return Ok(()) };
        self.file.sync_all()?;
        std::fs::rename(partial, path)?;
        let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty());
        File::open(directory.unwrap_or(Path::new(".")))?.sync_all()
    }

    /// Writes a whole stream; `spare` takes the buffers back.
    pub fn write(
        &self,
        header: &Header,
        items: &Receiver<Item>,
        spare: &Sender<Vec<u8>>,
    ) -> Result<Totals, WriteFault> {
        let mut out = BufWriter::with_capacity(BUFFER_BYTES, &self.file);
        let (mut encoder, first) = Encoder::new(header)?;
        out.write_all(&first)?;
        let expected = header.data_bytes + header.zero_bytes;
        for item in items {
            match item {
                Item::Data(offset, data) => {
                    out.write_all(&encoder.data(offset, &data)?)?;
                    out.write_all(&data)?;
                    drop(spare.try_send(data));
                }
                Item::Zero(offset, length) => out.write_all(&encoder.zero(offset, length)?)?,
            }
        }
        let totals = encoder.totals();
        if totals.data_bytes + totals.zero_bytes != expected {
            return Err(WriteFault::BrokenOff);
        }
        out.write_all(&encoder.end()?)?;
        out.flush()?;
        Ok(totals)
    }
}

impl From<WriteFault> for Failure {
    fn from(fault: WriteFault) -> Failure {
        match &fault {
            WriteFault::Io(error) if error.kind() == ErrorKind::BrokenPipe => {
                Failure::failed("whoever reads the stream closed it before its end")
            }
            WriteFault::Io(error) => Failure::failed(format!("the stream cannot be written: {error}")),
            _ => Failure::failed(fault.to_string()),
        }
    }
}
