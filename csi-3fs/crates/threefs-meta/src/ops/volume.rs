//! Operations on volumes: quotas, recounts of their files, and the scope of their credentials.

pub(crate) mod quota;
pub(crate) mod recount;
pub(crate) mod scope;
pub(crate) mod set_quota;
