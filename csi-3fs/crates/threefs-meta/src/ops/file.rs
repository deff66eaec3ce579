//! File operations: length reports, reservations, write sessions, truncation and the rows of written
//! chunks.

pub(crate) mod length;
pub(crate) mod session;
pub(crate) mod trim;
pub(crate) mod written_rows;
