//! Operations on volumes: quotas, and recounts of their files.

pub(crate) mod recount;
pub(crate) mod set_quota;
